//! Rows for people (aligned, with a head) and for pipes (tab-separated, no head).

use unicode_width::{UnicodeWidthChar, UnicodeWidthStr};

use super::escape;

/// How a column gives way when the terminal is narrow.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fit {
    /// Never shortened.
    Keep,
    /// Cut with `…` when the row would be too wide.
    Shrink,
}

/// A column's head and how it is set.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    pub(crate) title: &'static str,
    pub(crate) right: bool,
    pub(crate) fit: Fit,
}

impl Column {
    pub(crate) const fn left(title: &'static str) -> Self {
        Self { title, right: false, fit: Fit::Keep }
    }

    pub(crate) const fn right(title: &'static str) -> Self {
        Self { title, right: true, fit: Fit::Keep }
    }

    pub(crate) const fn shrink(title: &'static str) -> Self {
        Self { title, right: false, fit: Fit::Shrink }
    }
}

/// An aligned table at most `width` columns wide, as far as its columns can shrink.
pub(crate) fn aligned(columns: &[Column], rows: &[Vec<String>], width: usize) -> String {
    let rows: Vec<Vec<String>> =
        rows.iter().map(|row| row.iter().map(|cell| escape(cell).into_owned()).collect()).collect();
    let mut widths: Vec<usize> = columns
        .iter()
        .enumerate()
        .map(|(index, column)| {
            let cells = rows.iter().map(|row| row.get(index).map_or(0, |cell| cell.width()));
            cells.max().unwrap_or(0).max(column.title.width())
        })
        .collect();
    let total = |widths: &[usize]| widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1);
    while total(&widths) > width {
        let widest = (0..columns.len())
            .filter(|&index| columns[index].fit == Fit::Shrink && widths[index] > 6)
            .max_by_key(|&index| widths[index]);
        let Some(widest) = widest else { break };
        widths[widest] -= 1;
    }
    let head: Vec<String> = columns.iter().map(|column| column.title.to_owned()).collect();
    let mut text = String::new();
    for row in std::iter::once(&head).chain(&rows) {
        let mut line = String::new();
        for (index, column) in columns.iter().enumerate() {
            let cell = shorten(row.get(index).map_or("", String::as_str), widths[index]);
            let pad = " ".repeat(widths[index].saturating_sub(cell.width()));
            if index > 0 {
                line.push_str("  ");
            }
            if column.right {
                line.push_str(&pad);
                line.push_str(&cell);
            } else {
                line.push_str(&cell);
                line.push_str(&pad);
            }
        }
        text.push_str(line.trim_end());
        text.push('\n');
    }
    text
}

/// One line per row, cells joined by tabs; tabs and line ends in cells are escaped.
pub(crate) fn tab_separated(rows: &[Vec<String>]) -> String {
    let mut text = String::new();
    for row in rows {
        let cells: Vec<_> = row.iter().map(|cell| escape(cell)).collect();
        text.push_str(&cells.join("\t"));
        text.push('\n');
    }
    text
}

/// Cuts to `width` columns, the last of which is then `…`.
pub(crate) fn shorten(text: &str, width: usize) -> String {
    if text.width() <= width {
        return text.to_owned();
    }
    let mut short = String::new();
    let mut used = 0;
    for c in text.chars() {
        let wide = c.width().unwrap_or(0);
        if used + wide + 1 > width {
            break;
        }
        short.push(c);
        used += wide;
    }
    short.push('…');
    short
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn table_fits_the_terminal_by_shrinking_what_may_shrink() {
        let columns = [Column::left("ID"), Column::shrink("NAME"), Column::right("N")];
        let rows = vec![vec!["batch_1".to_owned(), "a very long name ".repeat(9), "1,000".to_owned()]];
        let text = aligned(&columns, &rows, 80);
        assert!(text.lines().all(|line| line.width() <= 80), "{text}");
        assert!(text.contains("batch_1") && text.contains("1,000") && text.contains('…'));
    }

    #[test]
    fn tab_in_a_cell_does_not_make_a_column() {
        assert_eq!(tab_separated(&[vec!["a\tb".to_owned(), "c\nd".to_owned()]]), "a\\tb\tc\\nd\n");
    }
}
