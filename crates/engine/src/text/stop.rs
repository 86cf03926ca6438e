//! Finds stop strings in text that arrives in pieces of any size.
//!
//! Invariant: text given out is never part of a stop string found later, and
//! nothing is held back that cannot still become one.
//! One Knuth–Morris–Pratt automaton per stop string (Knuth, Morris & Pratt, Fast
//! Pattern Matching in Strings, 1977): the cost per byte does not depend on how
//! much came before, and the result does not depend on where the pieces are cut.

/// What one piece of text led to.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct StopStep {
    /// Text that may be given out now.
    pub text: String,
    /// Index of the stop string that was found; nothing follows it.
    pub hit: Option<usize>,
}

/// Watches one output for its stop strings. The one that ends first wins; of those
/// that end together, the longest.
#[derive(Debug, Clone)]
pub struct StopMatcher {
    patterns: Vec<Pattern>,
    include: bool,
    held: String,
}

#[derive(Debug, Clone)]
struct Pattern {
    index: usize,
    bytes: Box<[u8]>,
    /// `fallback[i]`: length of the longest proper border of the first `i` bytes.
    fallback: Box<[u32]>,
    matched: usize,
}

impl StopMatcher {
    /// Empty strings match nothing. With `include`, the text found stays in the output.
    pub fn new(stops: &[String], include: bool) -> Self {
        let patterns = stops.iter().enumerate().filter(|(_, stop)| !stop.is_empty());
        let patterns = patterns.map(|(index, stop)| Pattern::new(index, stop)).collect();
        Self { patterns, include, held: String::new() }
    }

    /// Takes the next piece of text. After a hit, nothing further may be pushed.
    pub fn push(&mut self, piece: &str) -> StopStep {
        if self.patterns.is_empty() {
            return StopStep { text: piece.to_owned(), hit: None };
        }
        let before = self.held.len();
        self.held.push_str(piece);
        for (at, byte) in piece.bytes().enumerate() {
            let end = before + at + 1;
            let mut found: Option<(usize, usize)> = None;
            for pattern in &mut self.patterns {
                if pattern.advance(byte) && found.is_none_or(|(len, _)| pattern.bytes.len() > len) {
                    found = Some((pattern.bytes.len(), pattern.index));
                }
            }
            if let Some((len, index)) = found {
                self.held.truncate(if self.include { end } else { end - len });
                return StopStep { text: std::mem::take(&mut self.held), hit: Some(index) };
            }
        }
        // A partial match begins with a stop string's first byte, which is a character's first byte.
        let kept = self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - kept);
        StopStep { text: std::mem::replace(&mut self.held, rest), hit: None }
    }

    /// The output has ended: what was held back is text after all.
    pub fn flush(&mut self) -> String {
        self.patterns.iter_mut().for_each(|pattern| pattern.matched = 0);
        std::mem::take(&mut self.held)
    }
}

impl Pattern {
    fn new(index: usize, stop: &str) -> Self {
        let bytes: Box<[u8]> = stop.as_bytes().into();
        let mut fallback = vec![0u32; bytes.len() + 1];
        let mut border = 0usize;
        for at in 1..bytes.len() {
            while border > 0 && bytes[at] != bytes[border] {
                border = fallback[border] as usize;
            }
            border += usize::from(bytes[at] == bytes[border]);
            fallback[at + 1] = u32::try_from(border).unwrap_or(0);
        }
        Self { index, bytes, fallback: fallback.into(), matched: 0 }
    }

    /// Whether the pattern ends with this byte.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched] as usize;
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        if self.matched < self.bytes.len() {
            return false;
        }
        self.matched = self.fallback[self.matched] as usize;
        true
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn run(stops: &[&str], include: bool, pieces: &[&str]) -> (String, Option<usize>) {
        let stops: Vec<String> = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut matcher = StopMatcher::new(&stops, include);
        let mut text = String::new();
        for piece in pieces {
            let step = matcher.push(piece);
            text += &step.text;
            if step.hit.is_some() {
                return (text, step.hit);
            }
        }
        text += &matcher.flush();
        (text, None)
    }

    // Field report 12: vllm#3574, #2577, #11089.
    #[test]
    fn stop_string_over_several_pieces_stops_with_exact_text() {
        let pieces = ["one t", "wo", " EN", "D th", "ree"];
        assert_eq!(run(&["END"], false, &pieces), ("one two ".to_owned(), Some(0)));
        assert_eq!(run(&["END"], true, &pieces), ("one two END".to_owned(), Some(0)));
        assert_eq!(run(&["zzz", "wo E"], false, &pieces), ("one t".to_owned(), Some(1)));
        assert_eq!(run(&["b"], false, &["aabcc"]), ("aa".to_owned(), Some(0)));
    }

    // Field report 14: vllm PR 45636.
    #[test]
    fn text_held_back_for_a_stop_string_is_not_lost() {
        let (text, hit) = run(&["</think>!"], false, &["a<", "/th", "ink", ">", " b </thin"]);
        assert_eq!((text.as_str(), hit), ("a</think> b </thin", None));
        let mut matcher = StopMatcher::new(&["\n\n".to_owned()], false);
        assert_eq!(matcher.push("</think>\n").text, "</think>");
        assert_eq!(matcher.push("x").text, "\nx");
    }

    #[test]
    fn first_end_wins_and_of_equal_ends_the_longest() {
        assert_eq!(run(&["abc", "b"], false, &["xabcd"]), ("xa".to_owned(), Some(1)));
        assert_eq!(run(&["b", "ab"], false, &["xabcd"]), ("x".to_owned(), Some(1)));
        assert_eq!(run(&[""], false, &["xabcd"]), ("xabcd".to_owned(), None));
    }

    #[test]
    fn nothing_is_held_back_without_need() {
        let mut matcher = StopMatcher::new(&["abab!".to_owned()], false);
        assert_eq!(matcher.push("xabab").text, "x");
        // "abab" may still go on from its second half.
        assert_eq!(matcher.push("a").text, "ab");
        assert_eq!(matcher.push("é").text, "abaé");
    }

    proptest! {
        #[test]
        fn result_does_not_depend_on_where_pieces_are_cut(
            text in "[abé]{0,24}",
            stops in proptest::collection::vec("[abé]{1,4}", 1..4),
            cuts in proptest::collection::vec(any::<proptest::sample::Index>(), 0..6),
            include in any::<bool>(),
        ) {
            let mut at: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).filter(|cut| text.is_char_boundary(*cut)).collect();
            at.extend([0, text.len()]);
            at.sort_unstable();
            let pieces: Vec<&str> = at.windows(2).map(|pair| &text[pair[0]..pair[1]]).collect();
            let names: Vec<&str> = stops.iter().map(String::as_str).collect();
            let expected = (1..=text.len()).filter(|end| text.is_char_boundary(*end)).find_map(|end| {
                let ending = stops.iter().enumerate().filter(|(_, stop)| text[..end].ends_with(stop.as_str()));
                let best = ending.max_by_key(|(index, stop)| (stop.len(), std::cmp::Reverse(*index)))?;
                let cut = if include { end } else { end - best.1.len() };
                Some((text[..cut].to_owned(), Some(best.0)))
            });
            prop_assert_eq!(run(&names, include, &pieces), expected.unwrap_or((text.clone(), None)));
        }
    }
}
