//! Lines out of pieces of a download.

/// Cuts a stream of bytes into lines.
#[derive(Debug, Default)]
pub(crate) struct Lines {
    rest: Vec<u8>,
}

impl Lines {
    /// The lines that are whole now, without their line ends; blank ones are left out.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Vec<Vec<u8>> {
        self.rest.extend_from_slice(bytes);
        let Some(end) = self.rest.iter().rposition(|&byte| byte == b'\n') else { return Vec::new() };
        let rest = self.rest.split_off(end + 1);
        let whole = std::mem::replace(&mut self.rest, rest);
        whole.split(|&byte| byte == b'\n').filter(|line| !line.is_empty()).map(<[u8]>::to_vec).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_survive_any_cut() {
        let text = b"one\ntwo\n\nthree\n";
        for cut in 0..text.len() {
            let mut lines = Lines::default();
            let mut found = lines.push(&text[..cut]);
            found.extend(lines.push(&text[cut..]));
            assert_eq!(found, [b"one".to_vec(), b"two".to_vec(), b"three".to_vec()], "cut at {cut}");
        }
    }
}
