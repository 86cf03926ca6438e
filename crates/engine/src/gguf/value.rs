//! Metadata values.

/// A metadata value.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// Unsigned, of any width.
    Unsigned(u64),
    /// Signed, of any width.
    Signed(i64),
    /// 32 or 64 bits wide.
    Float(f64),
    /// True or false.
    Bool(bool),
    /// UTF-8 text.
    String(String),
    /// An array, by the type of its elements.
    Array(Array),
}

/// A metadata array; the long ones (vocabularies) are kept compact.
#[derive(Debug, Clone, PartialEq)]
pub enum Array {
    /// Integers of any width and sign; unsigned 64-bit values beyond `i64::MAX` are refused.
    Integers(Vec<i64>),
    /// 32- or 64-bit floats.
    Floats(Vec<f32>),
    /// Booleans.
    Bools(Vec<bool>),
    /// Strings.
    Strings(Vec<String>),
    /// Arrays of arrays.
    Arrays(Vec<Array>),
}

impl Value {
    /// The number as an unsigned one, when it is a whole number that fits.
    pub fn as_u64(&self) -> Option<u64> {
        match self {
            Self::Unsigned(v) => Some(*v),
            Self::Signed(v) => u64::try_from(*v).ok(),
            _ => None,
        }
    }

    /// Any number as a float.
    pub fn as_f64(&self) -> Option<f64> {
        match self {
            Self::Unsigned(v) => Some(*v as f64),
            Self::Signed(v) => Some(*v as f64),
            Self::Float(v) => Some(*v),
            _ => None,
        }
    }

    /// The text of a string.
    pub fn as_str(&self) -> Option<&str> {
        match self {
            Self::String(s) => Some(s),
            _ => None,
        }
    }

    /// The value of a boolean.
    pub fn as_bool(&self) -> Option<bool> {
        match self {
            Self::Bool(b) => Some(*b),
            _ => None,
        }
    }

    /// The elements of an array of strings.
    pub fn as_strings(&self) -> Option<&[String]> {
        match self {
            Self::Array(Array::Strings(v)) => Some(v),
            _ => None,
        }
    }

    /// The elements of an array of integers.
    pub fn as_integers(&self) -> Option<&[i64]> {
        match self {
            Self::Array(Array::Integers(v)) => Some(v),
            _ => None,
        }
    }

    /// The elements of an array of floats.
    pub fn as_floats(&self) -> Option<&[f32]> {
        match self {
            Self::Array(Array::Floats(v)) => Some(v),
            _ => None,
        }
    }
}
