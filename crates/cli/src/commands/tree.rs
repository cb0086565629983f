//! `coppice tree`: which sandbox was forked from which. Parents that are gone are shown as such.

use std::collections::{BTreeMap, BTreeSet};

use coppice_client::api::{BootMode, Sandbox};
use jiff::Timestamp;
use serde::Serialize;

use crate::commands::Context;
use crate::error::CliError;
use crate::output::Style;
use crate::words;

/// A sandbox and what was forked from it.
#[derive(Debug, Serialize)]
struct Node<'a> {
    id: &'a str,
    /// Absent: it is gone.
    #[serde(skip_serializing_if = "Option::is_none")]
    sandbox: Option<&'a Sandbox>,
    gone: bool,
    children: Vec<Node<'a>>,
}

pub(crate) async fn run(context: &Context<'_>) -> Result<(), CliError> {
    let sandboxes = context.client()?.list().await?;
    let forest = forest(&sandboxes);
    context.output.result(&forest, |style| {
        if forest.is_empty() { "no sandboxes; `coppice sandbox create` makes one".into() } else { draw(style, &forest) }
    })
}

/// Roots in the order of creation; a parent that is gone stands where its first child would.
fn forest(sandboxes: &[Sandbox]) -> Vec<Node<'_>> {
    let known: BTreeMap<&str, &Sandbox> = sandboxes.iter().map(|sandbox| (sandbox.id.as_str(), sandbox)).collect();
    let mut children: BTreeMap<&str, Vec<&Sandbox>> = BTreeMap::new();
    let mut roots: Vec<&str> = Vec::new();
    for sandbox in sandboxes {
        let parent = parent(sandbox);
        if let Some(parent) = parent {
            children.entry(parent).or_default().push(sandbox);
        }
        let root = match parent {
            None => sandbox.id.as_str(),
            Some(parent) if !known.contains_key(parent) => parent,
            Some(_) => continue,
        };
        if !roots.contains(&root) {
            roots.push(root);
        }
    }
    for list in children.values_mut() {
        by_fork(list);
    }
    let mut seen = BTreeSet::new();
    let mut forest: Vec<Node<'_>> = roots.into_iter().map(|id| node(id, &known, &children, &mut seen)).collect();
    // Records that name each other as parents would be reachable from no root.
    for sandbox in sandboxes {
        if !seen.contains(sandbox.id.as_str()) {
            forest.push(node(&sandbox.id, &known, &children, &mut seen));
        }
    }
    forest
}

/// Children of one call together, the calls in the order of their first children, and within a call by index.
fn by_fork(children: &mut Vec<&Sandbox>) {
    let tree = |child: &Sandbox| child.metadata.get("fork_tree_id").cloned().unwrap_or_default();
    let mut trees: Vec<String> = Vec::new();
    for child in children.iter() {
        if !trees.contains(&tree(child)) {
            trees.push(tree(child));
        }
    }
    let index = |child: &Sandbox| child.metadata.get("fork_index").and_then(|index| index.parse::<u32>().ok());
    children.sort_by_key(|child| (trees.iter().position(|known| *known == tree(child)), index(child)));
}

fn parent(sandbox: &Sandbox) -> Option<&str> {
    sandbox.metadata.get("fork_parent_id").map(String::as_str).filter(|id| !id.is_empty())
}

fn node<'a>(
    id: &'a str,
    known: &BTreeMap<&'a str, &'a Sandbox>,
    children: &BTreeMap<&'a str, Vec<&'a Sandbox>>,
    seen: &mut BTreeSet<&'a str>,
) -> Node<'a> {
    seen.insert(id);
    let mut below = Vec::new();
    for child in children.get(id).into_iter().flatten() {
        if !seen.contains(child.id.as_str()) {
            below.push(node(&child.id, known, children, seen));
        }
    }
    let sandbox = known.get(id).copied();
    Node { id, sandbox, gone: sandbox.is_none(), children: below }
}

fn draw(style: Style, forest: &[Node<'_>]) -> String {
    let now = Timestamp::now();
    let mut lines = Vec::new();
    for root in forest {
        branch(style, root, "", "", now, &mut lines);
    }
    lines.join("\n")
}

fn branch(style: Style, node: &Node<'_>, first: &str, rest: &str, now: Timestamp, lines: &mut Vec<String>) {
    lines.push(format!("{}{}", style.dim(first), label(style, node, now)));
    let last = node.children.len().saturating_sub(1);
    for (index, child) in node.children.iter().enumerate() {
        let (head, tail) = if index == last { ("└─ ", "   ") } else { ("├─ ", "│  ") };
        branch(style, child, &format!("{rest}{head}"), &format!("{rest}{tail}"), now, lines);
    }
}

fn label(style: Style, node: &Node<'_>, now: Timestamp) -> String {
    use crate::table::Tone;
    let Some(sandbox) = node.sandbox else {
        return style.dim(&format!("{} gone", words::short(node.id)));
    };
    let status = words::status(sandbox.status);
    let status = match words::status_tone(sandbox.status) {
        Tone::Good => style.good(status),
        Tone::Bad => style.bad(status),
        Tone::Note => style.note(status),
        _ => style.dim(status),
    };
    let mut text = format!("{}  {status}  {}", style.strong(words::short(&sandbox.id)), sandbox.template);
    text.push_str(&format!("  {}", words::age(&sandbox.created_at, now)));
    if parent(sandbox).is_some() {
        let index = sandbox.metadata.get("fork_index").map(|index| format!(" #{index}")).unwrap_or_default();
        let what = if sandbox.boot_mode == BootMode::Snapshot { "memory and disk" } else { "disk" };
        text.push_str(&style.dim(&format!("  fork{index} ({what})")));
    }
    if let Some(successor) = sandbox.metadata.get("successor") {
        text.push_str(&style.dim(&format!("  went on as {}", words::short(successor))));
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(id: &str, parent: Option<&str>) -> Sandbox {
        let metadata = parent.map(|parent| serde_json::json!({"fork_parent_id": parent, "fork_index": "0"}));
        serde_json::from_value(serde_json::json!({
            "id": id, "template": "base", "cpu": 1, "memory_mb": 512, "status": "running", "guest_ip": "",
            "metadata": metadata.unwrap_or_else(|| serde_json::json!({})), "boot_ms": 90, "boot_mode": "snapshot",
            "created_at": "2026-01-01T00:00:00Z", "persistent": false, "ttl_seconds": 600,
        }))
        .unwrap()
    }

    fn shape(sandboxes: &[Sandbox]) -> Vec<String> {
        let text = draw(Style { color: false }, &forest(sandboxes));
        text.lines().map(|line| line.split("  running").next().unwrap_or_default().to_owned()).collect()
    }

    #[test]
    fn children_hang_below_their_parents() {
        let list = [
            sandbox("a", None),
            sandbox("b", None),
            sandbox("a1", Some("a")),
            sandbox("a11", Some("a1")),
            sandbox("a2", Some("a")),
        ];
        assert_eq!(shape(&list), ["a", "├─ a1", "│  └─ a11", "└─ a2", "b"]);
    }

    #[test]
    fn a_parent_that_is_gone_still_holds_its_children_together() {
        let list = [sandbox("b", Some("x")), sandbox("c", Some("x"))];
        assert_eq!(shape(&list), ["x gone", "├─ b", "└─ c"]);
        let json = serde_json::to_value(forest(&list)).unwrap();
        assert_eq!((&json[0]["gone"], &json[0]["children"][0]["id"]), (&true.into(), &"b".into()));
    }

    #[test]
    fn records_that_name_each_other_are_drawn_once() {
        let list = [sandbox("a", Some("b")), sandbox("b", Some("a")), sandbox("c", Some("c"))];
        assert_eq!(shape(&list), ["a", "└─ b", "c"]);
    }
}
