//! A page of metrics in the making.

use prometheus::core::Collector;
use prometheus::proto::{Bucket, Counter, Gauge, Histogram, LabelPair, Metric, MetricFamily, MetricType};
use prometheus::{Error, TextEncoder};

/// Metrics in the order in which they were added; those of one name stand together.
#[derive(Debug, Default)]
pub struct MetricsPage {
    families: Vec<MetricFamily>,
}

impl MetricsPage {
    /// A value that only rises while the process lives; its name ends in `_total`.
    pub fn counter(&mut self, name: &str, help: &str, labels: &[(&str, &str)], value: f64) {
        let mut counter = Counter::default();
        counter.set_value(value);
        let mut metric = labelled(labels);
        metric.set_counter(counter);
        self.add(name, help, MetricType::COUNTER, metric);
    }

    /// A value that comes and goes.
    pub fn gauge(&mut self, name: &str, help: &str, labels: &[(&str, &str)], value: f64) {
        let mut gauge = Gauge::default();
        gauge.set_value(value);
        let mut metric = labelled(labels);
        metric.set_gauge(gauge);
        self.add(name, help, MetricType::GAUGE, metric);
    }

    /// A distribution: rising upper bounds with the number of values up to each, all values'
    /// sum, and their number.
    pub fn histogram(
        &mut self,
        name: &str,
        help: &str,
        labels: &[(&str, &str)],
        cumulative: impl IntoIterator<Item = (f64, u64)>,
        (sum, count): (f64, u64),
    ) {
        let bucket = |(bound, up_to): (f64, u64)| {
            let mut bucket = Bucket::default();
            bucket.set_upper_bound(bound);
            bucket.set_cumulative_count(up_to);
            bucket
        };
        let mut histogram = Histogram::default();
        histogram.set_bucket(cumulative.into_iter().map(bucket).collect());
        histogram.set_sample_sum(sum);
        histogram.set_sample_count(count);
        let mut metric = labelled(labels);
        metric.set_histogram(histogram);
        self.add(name, help, MetricType::HISTOGRAM, metric);
    }

    /// What a collector has; nothing when it has no value yet.
    pub(crate) fn collect(&mut self, collector: &impl Collector) {
        self.families.extend(collector.collect().into_iter().filter(|family| !family.get_metric().is_empty()));
    }

    fn add(&mut self, name: &str, help: &str, kind: MetricType, metric: Metric) {
        let known = self.families.iter_mut().find(|family| family.name() == name);
        let family = match known {
            Some(family) => family,
            None => {
                let mut family = MetricFamily::default();
                family.set_name(name.to_owned());
                family.set_help(help.to_owned());
                family.set_field_type(kind);
                self.families.push(family);
                self.families.last_mut().expect("just added")
            }
        };
        assert_eq!(family.get_field_type(), kind, "{name} is of two types");
        family.mut_metric().push(metric);
    }

    /// In the text format 0.0.4.
    pub(crate) fn text(&self) -> Result<String, Error> {
        TextEncoder::new().encode_to_string(&self.families)
    }
}

fn labelled(labels: &[(&str, &str)]) -> Metric {
    let pair = |&(name, value): &(&str, &str)| {
        let mut pair = LabelPair::default();
        pair.set_name(name.to_owned());
        pair.set_value(value.to_owned());
        pair
    };
    Metric::from_label(labels.iter().map(pair).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn families_stand_together_and_values_are_quoted() {
        let mut page = MetricsPage::default();
        page.gauge("a", "An a", &[("model", "x\"y\\z\n")], 1.5);
        page.counter("b_total", "A b", &[], 7.0);
        page.gauge("a", "An a", &[("model", "other")], 0.0);
        page.histogram("c", "A c", &[("k", "v")], [(0.5, 1), (1.0, 3)], (9.25, 4));
        let expected = "# HELP a An a\n# TYPE a gauge\na{model=\"x\\\"y\\\\z\\n\"} 1.5\na{model=\"other\"} 0\n\
                        # HELP b_total A b\n# TYPE b_total counter\nb_total 7\n\
                        # HELP c A c\n# TYPE c histogram\nc_bucket{k=\"v\",le=\"0.5\"} 1\nc_bucket{k=\"v\",le=\"1\"} 3\n\
                        c_bucket{k=\"v\",le=\"+Inf\"} 4\nc_sum{k=\"v\"} 9.25\nc_count{k=\"v\"} 4\n";
        assert_eq!(page.text().unwrap(), expected);
    }
}
