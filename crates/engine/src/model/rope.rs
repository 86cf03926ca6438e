//! Frequencies of the rotary embedding, in the variants that checkpoints name.

use serde_json::{Map, Value};

/// A variant, with all its numbers.
#[derive(Debug, Clone, PartialEq)]
pub struct Rope {
    /// Base of the frequencies, `rope_theta`.
    pub theta: f64,
    /// How they are stretched.
    pub scaling: RopeScaling,
}

/// How frequencies are stretched for contexts beyond the training length.
#[derive(Debug, Clone, PartialEq)]
pub enum RopeScaling {
    /// Not at all.
    Default,
    /// Positions divided by a factor.
    Linear {
        /// The factor.
        factor: f64,
    },
    /// Low frequencies divided, high ones kept, smooth in between (Llama 3.1).
    Llama3 {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Wavelengths above `original / low` are divided.
        low_freq_factor: f64,
        /// Wavelengths below `original / high` are kept.
        high_freq_factor: f64,
        /// Training length, tokens.
        original_max_position: f64,
    },
    /// Peng et al., YaRN: Efficient Context Window Extension of Large Language Models, 2023.
    Yarn {
        /// Divisor of the low frequencies.
        factor: f64,
        /// Rotations above which a frequency is kept.
        beta_fast: f64,
        /// Rotations below which it is divided.
        beta_slow: f64,
        /// Training length, tokens.
        original_max_position: f64,
        /// Factor of cosine and sine.
        attention_factor: f64,
        /// Whether the bounds are rounded to whole dimensions.
        truncate: bool,
    },
}

impl Rope {
    /// The plain variant.
    pub fn plain(theta: f64) -> Self {
        Self { theta, scaling: RopeScaling::Default }
    }

    /// Reads `rope_scaling` or `rope_parameters` of config.json. An unknown `rope_type` (or, in
    /// older files, `type`) and a missing number are errors that name the key.
    pub fn from_json(theta: f64, scaling: &Map<String, Value>, max_position: u32) -> Result<Self, String> {
        let number = |key: &str| scaling.get(key).and_then(Value::as_f64);
        let need = |key: &str| number(key).ok_or_else(|| format!("rope_scaling lacks the number {key}"));
        let kind = |key: &str| scaling.get(key).and_then(Value::as_str);
        let kind = match (kind("rope_type"), kind("type")) {
            (Some(a), Some(b)) if a != b && b != "mrope" => {
                return Err(format!("rope_scaling says rope_type {a:?} and type {b:?}; they must agree"));
            }
            (Some(kind), _) | (None, Some(kind)) => kind,
            (None, None) => "default",
        };
        let theta = number("rope_theta").unwrap_or(theta);
        if number("partial_rotary_factor").is_some_and(|factor| factor != 1.0) {
            return Err("partial_rotary_factor other than 1 is not supported".to_owned());
        }
        let original = || number("original_max_position_embeddings").unwrap_or(f64::from(max_position));
        let scaling = match kind {
            "default" => RopeScaling::Default,
            "linear" => RopeScaling::Linear { factor: need("factor")? },
            "llama3" => RopeScaling::Llama3 {
                factor: need("factor")?,
                low_freq_factor: need("low_freq_factor")?,
                high_freq_factor: need("high_freq_factor")?,
                original_max_position: need("original_max_position_embeddings")?,
            },
            "yarn" => {
                let factor = need("factor")?;
                RopeScaling::Yarn {
                    factor,
                    beta_fast: number("beta_fast").unwrap_or(32.0),
                    beta_slow: number("beta_slow").unwrap_or(1.0),
                    original_max_position: original(),
                    attention_factor: number("attention_factor")
                        .unwrap_or_else(|| yarn_attention_factor(factor, number("mscale"), number("mscale_all_dim"))),
                    truncate: scaling.get("truncate").and_then(Value::as_bool).unwrap_or(true),
                }
            }
            other => {
                return Err(format!("rope type {other:?} is not supported; default, linear, llama3 and yarn are"));
            }
        };
        let rope = Self { theta, scaling };
        match &rope.scaling {
            RopeScaling::Linear { factor } | RopeScaling::Llama3 { factor, .. } | RopeScaling::Yarn { factor, .. }
                if !(factor.is_finite() && *factor >= 1.0) =>
            {
                Err(format!("rope factor {factor} is not at least 1"))
            }
            _ if !(theta.is_finite() && theta > 1.0) => Err(format!("rope_theta {theta} is not above 1")),
            _ => Ok(rope),
        }
    }

    /// Frequencies of a head of `dim` elements, `[dim / 2]`, radians per position.
    pub fn frequencies(&self, dim: usize) -> Vec<f32> {
        let base = |i: usize| 1.0 / self.theta.powf(2.0 * i as f64 / dim as f64);
        (0..dim / 2).map(|i| self.stretched(i, base(i), dim) as f32).collect()
    }

    /// What cosine and sine are multiplied with.
    pub fn attention_factor(&self) -> f32 {
        match self.scaling {
            RopeScaling::Yarn { attention_factor, .. } => attention_factor as f32,
            _ => 1.0,
        }
    }

    fn stretched(&self, i: usize, frequency: f64, dim: usize) -> f64 {
        match self.scaling {
            RopeScaling::Default => frequency,
            RopeScaling::Linear { factor } => frequency / factor,
            RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_max_position } => {
                let wavelength = std::f64::consts::TAU / frequency;
                if wavelength < original_max_position / high_freq_factor {
                    frequency
                } else if wavelength > original_max_position / low_freq_factor {
                    frequency / factor
                } else {
                    let smooth =
                        (original_max_position / wavelength - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    (1.0 - smooth) * frequency / factor + smooth * frequency
                }
            }
            RopeScaling::Yarn { factor, beta_fast, beta_slow, original_max_position, truncate, .. } => {
                // The dimension that makes `rotations` turns within the training length.
                let dimension = |rotations: f64| {
                    dim as f64 * (original_max_position / (rotations * std::f64::consts::TAU)).ln()
                        / (2.0 * self.theta.ln())
                };
                let (mut low, mut high) = (dimension(beta_fast), dimension(beta_slow));
                if truncate {
                    (low, high) = (low.floor(), high.ceil());
                }
                let (low, mut high) = (low.max(0.0), high.min(dim as f64 - 1.0));
                if low == high {
                    high += 0.001;
                }
                let divided = ((i as f64 - low) / (high - low)).clamp(0.0, 1.0);
                frequency / factor * divided + frequency * (1.0 - divided)
            }
        }
    }
}

/// The default of YaRN's temperature: eq. 22, or the ratio that DeepSeek's files ask for.
fn yarn_attention_factor(factor: f64, mscale: Option<f64>, mscale_all_dim: Option<f64>) -> f64 {
    let of = |mscale: f64| if factor <= 1.0 { 1.0 } else { 0.1 * mscale * factor.ln() + 1.0 };
    match (mscale, mscale_all_dim) {
        (Some(a), Some(b)) if a != 0.0 && b != 0.0 => of(a) / of(b),
        _ => of(1.0),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn parse(value: Value) -> Result<Rope, String> {
        Rope::from_json(10000.0, value.as_object().expect("object"), 2048)
    }

    // Field report 57.
    #[test]
    fn type_and_rope_type_mean_the_same_and_unknown_types_are_refused() {
        assert_eq!(
            parse(json!({"type": "linear", "factor": 4.0})),
            parse(json!({"rope_type": "linear", "factor": 4.0}))
        );
        assert!(parse(json!({"rope_type": "longrope", "factor": 4.0})).expect_err("unknown").contains("longrope"));
        assert!(parse(json!({"rope_type": "linear"})).expect_err("missing").contains("factor"));
        assert!(parse(json!({"rope_type": "yarn", "type": "linear", "factor": 4.0})).is_err());
    }

    #[test]
    fn llama3_keeps_high_frequencies_and_divides_low_ones() {
        let rope = parse(json!({"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}))
        .expect("valid");
        let (plain, scaled) = (Rope::plain(10000.0).frequencies(64), rope.frequencies(64));
        assert_eq!(plain[0], scaled[0]);
        assert_eq!(plain[31] / 8.0, scaled[31]);
    }
}
