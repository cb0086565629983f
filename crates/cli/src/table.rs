//! Tables without borders.

use comfy_table::{Attribute, Cell, Color, ContentArrangement, Table, presets};

use crate::output::Style;

/// What a cell means, for its colour.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// Nothing special.
    Plain,
    /// Success.
    Good,
    /// Failure.
    Bad,
    /// Something to look at.
    Note,
    /// Less important.
    Dim,
}

/// A cell: its text and tone.
pub type Field = (String, Tone);

/// A plain cell.
pub fn plain(text: impl Into<String>) -> Field {
    (text.into(), Tone::Plain)
}

/// Rows under a header, without a line end at the end.
#[must_use]
pub fn render(style: Style, header: &[&str], rows: Vec<Vec<Field>>) -> String {
    let mut table = Table::new();
    table.load_style(presets::NOTHING).set_content_arrangement(ContentArrangement::Disabled);
    if style.color {
        table.enforce_styling();
    } else {
        table.force_no_tty();
    }
    table.set_header(header.iter().map(|name| Cell::new(name.to_uppercase()).add_attribute(Attribute::Dim)));
    for row in rows {
        table.add_row(row.into_iter().map(cell));
    }
    for column in table.column_iter_mut() {
        column.set_padding((0, 2));
    }
    table.lines().map(|line| line.trim_end().to_owned()).collect::<Vec<_>>().join("\n")
}

fn cell((text, tone): Field) -> Cell {
    // A guest's text must not move the cursor or break the row.
    let cell = Cell::new(text.replace(char::is_control, " "));
    match tone {
        Tone::Plain => cell,
        Tone::Good => cell.fg(Color::Green),
        Tone::Bad => cell.fg(Color::Red),
        Tone::Note => cell.fg(Color::Yellow),
        Tone::Dim => cell.add_attribute(Attribute::Dim),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_line_up_and_lines_have_no_tail() {
        let rows = vec![vec![plain("a"), plain("bb\x1b[2J")], vec![plain("ccc"), plain("")]];
        let text = render(Style { color: false }, &["id", "what"], rows);
        assert_eq!(text, "ID   WHAT\na    bb [2J\nccc");
    }
}
