//! What a remote store answered, or why it gave no answer, in words with a remedy.
//!
//! Invariant: it holds a status, a code and our own words, never a request, a header
//! or a whole answer: some services put the signed text of a request into it.

use std::fmt;

use object_store::client::HttpErrorKind;

/// Most characters of a service's own message.
const MESSAGE_CHARS_MAX: usize = 160;
/// Clocks further apart than this are named: S3 refuses at 15 minutes.
const SKEW_NAMED_S: i64 = 300;

/// A refusal that no repetition mends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Refusal {
    pub(crate) status: u16,
    /// The service's own code; empty when the answer had none (as one to HEAD).
    pub(crate) code: String,
    message: String,
    /// The region that the bucket is in, when the answer said it.
    region: Option<String>,
    /// How far this host's clock is ahead of the service's, seconds.
    ahead_s: Option<i64>,
}

impl Refusal {
    /// Reads an answer's status, the headers that matter, and its body.
    pub(crate) fn read(status: u16, header: impl Fn(&str) -> Option<String>, body: &str, now_s: i64) -> Self {
        let message = element(body, "Message").unwrap_or_default();
        Self {
            status,
            code: element(body, "Code").or_else(|| header("x-ms-error-code")).unwrap_or_default(),
            message: message.lines().next().unwrap_or_default().chars().take(MESSAGE_CHARS_MAX).collect(),
            region: header("x-amz-bucket-region").or_else(|| element(body, "Region")),
            ahead_s: header("date").and_then(|date| seconds_of(&date)).map(|theirs| now_s - theirs),
        }
    }

    /// Whether it says that the bucket itself is not there.
    pub(crate) fn is_no_bucket(&self) -> bool {
        matches!(
            self.code.as_str(),
            "NoSuchBucket" | "ContainerNotFound" | "ContainerBeingDeleted" | "ContainerDisabled"
        )
    }

    fn remedy(&self) -> String {
        if let Some(ahead) = self.ahead_s.filter(|ahead| ahead.abs() > SKEW_NAMED_S)
            && (self.status == 403 || self.code == "RequestTimeTooSkewed")
        {
            let (by, side) = (ahead.abs(), if ahead > 0 { "ahead of" } else { "behind" });
            return format!("this host's clock is {by} s {side} the store's; set it, best by NTP");
        }
        match (self.code.as_str(), self.status) {
            (_, 301 | 302 | 307 | 308) | ("AuthorizationHeaderMalformed" | "PermanentRedirect", _) => match &self.region {
                Some(region) => format!("the bucket is in another region; set AWS_REGION={region}"),
                None => "the bucket is in another region or behind another endpoint; set AWS_REGION or AWS_ENDPOINT_URL".to_owned(),
            },
            ("NoSuchBucket" | "ContainerNotFound" | "ContainerBeingDeleted" | "ContainerDisabled", _) => {
                "there is no such bucket or container; make it, or correct objects.url".to_owned()
            }
            ("InvalidAccessKeyId", _) => "the service does not know this access key; look at AWS_ACCESS_KEY_ID".to_owned(),
            ("SignatureDoesNotMatch", _) => {
                "the secret key does not belong to the access key; look at AWS_SECRET_ACCESS_KEY".to_owned()
            }
            ("ExpiredToken" | "InvalidToken", _) => {
                "the session token has run out; renew AWS_SESSION_TOKEN or use an instance role".to_owned()
            }
            ("RequestTimeTooSkewed", _) => "this host's clock is wrong; set it, best by NTP".to_owned(),
            ("AuthenticationFailed" | "AuthorizationFailure", _) => {
                "the account's key or token is wrong, or may not do this; look at the AZURE_STORAGE_ variables".to_owned()
            }
            (_, 401) => "the service does not accept these credentials; look at the store's variables".to_owned(),
            (_, 403) => {
                "these credentials may not do this here; grant reading, writing, deleting and listing on bucket and prefix".to_owned()
            }
            _ => "look at the store's endpoint and its own log".to_owned(),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the store answered {}", self.status)?;
        if !self.code.is_empty() {
            write!(f, " {}", self.code)?;
        }
        if !self.message.is_empty() {
            write!(f, " ({})", self.message)?;
        }
        write!(f, "; {}", self.remedy())
    }
}

impl std::error::Error for Refusal {}

/// No answer came.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Silence {
    kind: Kind,
    /// Scheme, host and port.
    whom: String,
    /// The innermost cause.
    why: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Connect,
    Slow,
    Cut,
    NoCredentials,
}

impl Silence {
    pub(crate) fn new(kind: HttpErrorKind, whom: String, err: &(dyn std::error::Error + 'static)) -> Self {
        let mut innermost = err;
        while let Some(source) = innermost.source() {
            innermost = source;
        }
        let kind = match kind {
            _ if is_metadata_service(&whom) => Kind::NoCredentials,
            HttpErrorKind::Connect => Kind::Connect,
            HttpErrorKind::Timeout => Kind::Slow,
            _ => Kind::Cut,
        };
        Self { kind, whom, why: innermost.to_string().chars().take(MESSAGE_CHARS_MAX).collect() }
    }
}

/// Where cloud machines ask for the credentials of their role.
pub(crate) fn is_metadata_service(whom: &str) -> bool {
    let host = whom.split_once("://").map_or(whom, |(_, host)| host);
    host.starts_with("169.254.") || host.starts_with("[fd00:ec2::254]") || host.starts_with("metadata")
}

impl fmt::Display for Silence {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { whom, why, .. } = self;
        match self.kind {
            Kind::Connect => write!(
                f,
                "no connection to {whom}: {why}; look at the endpoint and the network, and for trouble with a certificate at SSL_CERT_FILE"
            ),
            Kind::Slow => write!(f, "{whom} gave no answer in time: {why}"),
            Kind::Cut => write!(f, "the connection to {whom} broke: {why}"),
            Kind::NoCredentials => write!(
                f,
                "no credentials: the environment names none and no machine role answers at {whom}; for S3 set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
            ),
        }
    }
}

impl std::error::Error for Silence {}

/// Text of the first element of this name in an XML answer.
fn element(body: &str, name: &str) -> Option<String> {
    let start = body.find(&format!("<{name}>"))? + name.len() + 2;
    let end = start + body[start..].find("</")?;
    let text = body[start..end].trim();
    let plain = text.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&apos;", "'");
    Some(plain.replace("&amp;", "&")).filter(|text| !text.is_empty())
}

/// Seconds since 1970 of an HTTP date (RFC 9110, section 5.6.7, the preferred form).
fn seconds_of(date: &str) -> Option<i64> {
    const MONTHS: [&str; 12] = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"];
    let fields: Vec<&str> = date.split([' ', ':']).collect();
    let [_, day, month, year, hours, minutes, seconds, "GMT"] = fields[..] else { return None };
    let month = MONTHS.iter().position(|name| *name == month)? as i64 + 1;
    let number = |text: &str| text.parse::<i64>().ok();
    let (year, day) = (number(year)?, number(day)?);
    // Days from the civil calendar: years begin in March, so that a leap day ends one.
    let (year, month) = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let era = year.div_euclid(400);
    let of_era = year - era * 400;
    let of_year = (153 * month + 2) / 5 + day - 1;
    let days = era * 146_097 + of_era * 365 + of_era / 4 - of_era / 100 + of_year - 719_468;
    Some(((days * 24 + number(hours)?) * 60 + number(minutes)?) * 60 + number(seconds)?)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refusal(status: u16, body: &str, headers: &[(&str, &str)]) -> String {
        let header =
            |name: &str| headers.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
        Refusal::read(status, header, body, 1_800_000_000).to_string()
    }

    fn error(code: &str) -> String {
        format!("<?xml version=\"1.0\"?><Error><Code>{code}</Code><Message>So &amp; so</Message></Error>")
    }

    #[test]
    fn each_refusal_says_what_to_do() {
        let cases = [
            (403, error("InvalidAccessKeyId"), "AWS_ACCESS_KEY_ID"),
            (403, error("SignatureDoesNotMatch"), "AWS_SECRET_ACCESS_KEY"),
            (400, error("ExpiredToken"), "AWS_SESSION_TOKEN"),
            (403, error("AccessDenied"), "listing on bucket"),
            (404, error("NoSuchBucket"), "correct objects.url"),
            (404, error("ContainerNotFound"), "correct objects.url"),
            (403, String::new(), "may not do this here"),
            (403, error("AuthenticationFailed"), "AZURE_STORAGE_"),
        ];
        for (status, body, words) in cases {
            let text = refusal(status, &body, &[]);
            assert!(text.contains(words) && text.starts_with(&format!("the store answered {status}")), "{text}");
        }
        assert!(refusal(403, &error("AccessDenied"), &[]).contains("(So & so)"));
    }

    #[test]
    fn bucket_of_another_region_names_it() {
        let text = refusal(301, "", &[("x-amz-bucket-region", "eu-west-1")]);
        assert!(text.contains("AWS_REGION=eu-west-1"), "{text}");
        let body = "<Error><Code>AuthorizationHeaderMalformed</Code><Region>us-east-2</Region></Error>";
        assert!(refusal(400, body, &[]).contains("AWS_REGION=us-east-2"));
    }

    // An answer to HEAD has no body: the clocks tell it all the same.
    #[test]
    fn wrong_clock_is_told_by_the_answers_date() {
        let text = refusal(403, "", &[("date", "Fri, 15 Jan 2027 07:50:00 GMT")]);
        assert!(text.contains("600 s ahead of"), "{text}");
        let text = refusal(403, "", &[("date", "Fri, 15 Jan 2027 08:00:30 GMT")]);
        assert!(!text.contains("clock"), "{text}");
        assert_eq!(seconds_of("Thu, 29 Feb 2024 12:00:01 GMT"), Some(1_709_208_001));
        assert_eq!(seconds_of("Thu, 01 Jan 1970 00:00:00 GMT"), Some(0));
        assert_eq!(seconds_of("yesterday"), None);
    }

    // S3 repeats the access key and the text to be signed to whoever signs it wrongly.
    #[test]
    fn what_the_service_repeats_of_the_request_is_not_shown() {
        let body = "<Error><Code>SignatureDoesNotMatch</Code><Message>no</Message>\
            <AWSAccessKeyId>AKIASECRET</AWSAccessKeyId><StringToSign>AWS4-HMAC hunter2</StringToSign></Error>";
        let refusal = Refusal::read(403, |_| None, body, 0);
        let shown = format!("{refusal} {refusal:?}");
        assert!(!shown.contains("AKIA") && !shown.contains("hunter2"), "{shown}");
    }
}
