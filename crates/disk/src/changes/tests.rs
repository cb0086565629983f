use std::cell::Cell;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt as _, PermissionsExt as _, symlink};
use std::path::Path;
use std::time::{Duration, Instant};

use proptest::prelude::*;

use super::*;
use crate::ext4_read::Patience;
use crate::ext4_read::testing::{build, edit, open};

const BOUNDS: Bounds = Bounds { since: None, listed: 1000, names: 100_000, content: 64 << 20 };

fn all(old: &Path, new: &Path) -> Changes {
    compare(&open(old), &open(new), &[], BOUNDS).unwrap()
}

/// `A path`, `M path aspects`, `D path`, without what mke2fs puts there itself.
fn lines(changes: &Changes) -> Vec<String> {
    let path = |entry: &Changed| String::from_utf8_lossy(&entry.path).into_owned();
    let added = changes.added.entries.iter().map(|entry| format!("A {} {}", path(entry), entry.size));
    let modified =
        changes.modified.entries.iter().map(|entry| format!("M {} {:?}", path(entry), entry.aspects.as_slice()));
    let deleted = changes.deleted.entries.iter().map(|entry| format!("D {} {}", path(entry), entry.size));
    added.chain(modified).chain(deleted).collect()
}

#[test]
fn every_kind_of_change_is_named_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("sub/deep")).unwrap();
    for name in
        ["same", "grows", "rewritten", "touched", "gone", "moved", "mode", "owner", "turns", "sub/deep/x", "attr"]
    {
        fs::write(tree.join(name), format!("this is {name}\n")).unwrap();
    }
    fs::hard_link(tree.join("same"), tree.join("linked")).unwrap();
    symlink("there", tree.join("link")).unwrap();
    File::create(tree.join("holes")).unwrap().set_len(1 << 34).unwrap();
    let old = build(&tree, &dir.path().join("old"));

    for (name, content) in
        [("big", "grows, and how\n"), ("anew", "THIS is rewritten\n"), ("as-was", "this is touched\n")]
    {
        fs::write(dir.path().join(name), content).unwrap();
    }
    fs::write(dir.path().join("rewrite"), "this IS rewritten\n").unwrap();
    let from = |name: &str| dir.path().join(name).display().to_string();
    let requests = [
        format!("rm grows\nwrite {} grows", from("big")),
        // The tool counts whole seconds; a kernel would have another time in this inode by itself.
        format!("rm rewritten\nwrite {} rewritten\nsif rewritten ctime 20300101000000", from("rewrite")),
        // Another inode with another time, and what it had before.
        format!("rm touched\nwrite {} touched", from("as-was")),
        "rm gone\nln moved moved-away\nunlink moved".into(),
        "sif mode mode 0100600\nsif owner uid 1000".into(),
        "rm turns\nmkdir turns\nrm sub/deep/x\nrmdir sub/deep".into(),
        "rm link\nsymlink link elsewhere".into(),
        "ea_set attr user.mark yes".into(),
        format!("mkdir new\ncd new\nwrite {} \"a name\"\nmkdir empty\nmknod pipe p", from("anew")),
    ];
    let new = edit(&old, &dir.path().join("new"), &(requests.join("\n") + "\n"));
    let changes = all(&old, &new);
    assert_eq!(
        lines(&changes),
        [
            "A /moved-away 14",
            "A /new 0",
            "A /new/a name 18",
            "A /new/empty 0",
            "A /new/pipe 0",
            "M /attr [Attributes]",
            "M /grows [Content]",
            "M /link [Target]",
            "M /mode [Mode]",
            "M /owner [Owner]",
            "M /rewritten [Content]",
            "M /turns [Kind]",
            "D /gone 13",
            "D /moved 14",
            "D /sub/deep 0",
            "D /sub/deep/x 19",
        ]
    );
    assert_eq!((changes.unreadable, changes.not_compared, changes.missing), (0, 0, None));
    assert_eq!((changes.added.count, changes.added.bytes), (5, 32));
    assert_eq!(changes.modified.entries[1].size_before, 14);
    // And back.
    let back = all(&new, &old);
    assert_eq!((back.added.count, back.deleted.count), (changes.deleted.count, changes.added.count));
    assert_eq!(lines(&all(&new, &new)), [""; 0]);
}

#[test]
fn only_what_is_below_is_looked_at() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("a/b")).unwrap();
    fs::create_dir_all(tree.join("ab")).unwrap();
    let old = build(&tree, &dir.path().join("old"));
    for name in ["a/b/1", "a/2", "ab/3", "4"] {
        fs::write(tree.join(name), name).unwrap();
    }
    let new = build(&tree, &dir.path().join("new"));
    let (old, new) = (open(&old), open(&new));
    let below = |names: &[&str]| {
        let names: Vec<_> = names.iter().map(|name| name.as_bytes().to_vec()).collect();
        lines(&compare(&old, &new, &names, BOUNDS).unwrap())
    };
    assert_eq!(below(&["a"]), ["A /a/2 3", "A /a/b/1 5"]);
    assert_eq!(below(&["a", "b", "1"]), ["A /a/b/1 5"]);
    assert_eq!(below(&["4"]), ["A /4 1"]);
    assert_eq!(below(&["none", "b"]), [""; 0]);
    assert_eq!(below(&[]).len(), 4);
}

#[test]
fn what_only_reached_the_disk_later_is_no_change_of_later() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("quiet")).unwrap();
    fs::create_dir_all(tree.join("home/sub")).unwrap();
    for name in ["quiet/gone-before", "home/gone-after", "home/edited-before", "home/edited-after", "home/sub/deep"] {
        fs::write(tree.join(name), name).unwrap();
    }
    let old = build(&tree, &dir.path().join("old"));
    fs::write(dir.path().join("f"), "other content").unwrap();
    let write = |path: &str, year: u32| {
        format!("write {} {path}\nsif {path} ctime {year}0601000000\n", dir.path().join("f").display())
    };
    let requests = [
        "rm quiet/gone-before\nsif quiet ctime 20290601000000\n".to_owned(),
        write("quiet/made-before", 2029),
        "rm home/gone-after\nsif home ctime 20310601000000\nsif / ctime 20310601000000\n".to_owned(),
        "rm home/edited-before\nrm home/edited-after\n".to_owned(),
        write("home/edited-before", 2029) + &write("home/edited-after", 2031),
        // A tree that was moved: it has the time, what is in it is as old as it was.
        "ln home/sub moved\nunlink home/sub\nsif moved ctime 20310601000000\n".to_owned(),
        "sif moved/deep ctime 20290601000000\n".to_owned(),
    ];
    let new = edit(&old, &dir.path().join("new"), &requests.concat());
    let since = Some(i128::from(1_893_456_000_u64) * 1_000_000_000);
    let changes = compare(&open(&old), &open(&new), &[], Bounds { since, ..BOUNDS }).unwrap();
    let expected = [
        "A /moved 0",
        "A /moved/deep 13",
        "M /home/edited-after [Content]",
        "D /home/gone-after 15",
        "D /home/sub 0",
        "D /home/sub/deep 13",
    ];
    assert_eq!(lines(&changes), expected);
    assert_eq!(changes.earlier, 3, "gone-before, made-before, edited-before");
}

#[test]
fn bounds_cut_lists_but_not_counts_and_say_what_is_missing() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("data"), vec![1; 100_000]).unwrap();
    let old = build(&tree, &dir.path().join("old"));
    for number in 0..30 {
        fs::write(tree.join(format!("{number:02}")), "12345").unwrap();
    }
    fs::write(tree.join("data"), vec![1; 100_000]).unwrap();
    let new = build(&tree, &dir.path().join("new"));
    let with = |bounds| compare(&open(&old), &open(&new), &[], bounds).unwrap();

    let cut = with(Bounds { listed: 3, ..BOUNDS });
    assert_eq!(lines(&cut), ["A /00 5", "A /01 5", "A /02 5"]);
    assert_eq!((cut.added.count, cut.added.bytes, cut.missing), (30, 150, None));
    // What is too much to be compared counts as changed, and is counted.
    let blind = with(Bounds { content: 1000, ..BOUNDS });
    assert_eq!((blind.modified.count, blind.not_compared), (1, 1));
    assert_eq!(with(Bounds { names: 20, ..BOUNDS }).missing, Some(Missing::TooManyNames));
    let late = Patience { deadline: Some(Instant::now()), ..Patience::default() };
    let image = Ext4Image::open(File::open(&new).unwrap(), late).unwrap();
    assert!(compare(&open(&old), &image, &[], BOUNDS).is_err(), "not even the root was read");
}

#[test]
fn a_directory_that_contains_itself_has_an_end() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("d/e")).unwrap();
    let old = build(&tree, &dir.path().join("old"));
    let new = edit(&old, &dir.path().join("new"), "ln d d/e/again\nln <2> d/root\n");
    let changes = all(&old, &new);
    assert_eq!(lines(&changes), ["A /d/e/again 0", "A /d/root 0"]);
}

#[test]
fn damage_is_counted_and_the_rest_is_told() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("bad")).unwrap();
    fs::write(tree.join("bad/inside"), "x").unwrap();
    fs::write(tree.join("nothing"), "x").unwrap();
    let old = build(&tree, &dir.path().join("old"));
    fs::write(dir.path().join("f"), "new").unwrap();
    let requests = format!(
        "write {} f\nsif bad block[2] 0x7fffffff\nsif bad block[5] 0x7fffffff\nclri nothing\n",
        dir.path().join("f").display()
    );
    let new = edit(&old, &dir.path().join("new"), &requests);
    let changes = all(&old, &new);
    assert_eq!(lines(&changes), ["A /f 3"]);
    assert_eq!((changes.unreadable, changes.deleted.count), (2, 0), "what can't be read was not deleted");
}

/// An image with a bit of everything, and where its metadata is.
fn busy_image(dir: &Path) -> std::path::PathBuf {
    let tree = dir.join("tree");
    fs::create_dir_all(tree.join("sub/dir")).unwrap();
    for number in 0..300 {
        fs::write(tree.join(format!("sub/some-name-{number}")), vec![7; number % 9]).unwrap();
    }
    let holes = File::create(tree.join("holes")).unwrap();
    for piece in 0..30 {
        holes.write_all_at(b"data", piece * 20_000).unwrap();
    }
    symlink("y".repeat(200), tree.join("long")).unwrap();
    fs::set_permissions(tree.join("holes"), fs::Permissions::from_mode(0o600)).unwrap();
    let image = build(&tree, &dir.join("image"));
    // With something to replay.
    fs::write(dir.join("block"), vec![0; 4096]).unwrap();
    let block = dir.join("block").display().to_string();
    edit(&image, &dir.join("logged"), &format!("jo\njw -b 5500 {block}\njw -b 5501 -r 5500 {block}\njc\n"))
}

/// Random damage, to what the readers look at: no panic, no endless loop, and a whole answer or an error.
#[test]
fn no_damage_makes_it_panic_or_go_on_for_ever() {
    let dir = tempfile::tempdir().unwrap();
    let good = busy_image(dir.path());
    let bytes = fs::read(&good).unwrap();
    // Blocks that are not empty: superblock, tables, inodes, directories, the journal, data.
    let used: Vec<usize> =
        (0..bytes.len() / 512).filter(|at| bytes[at * 512..][..512].iter().any(|b| *b != 0)).collect();
    let copy = dir.path().join("damaged");
    fs::write(&copy, &bytes).unwrap();
    let file = File::options().read(true).write(true).open(&copy).unwrap();
    let old = open(&good);
    let answered = Cell::new(0);
    let mut runner = proptest::test_runner::TestRunner::new(ProptestConfig {
        failure_persistence: None,
        ..ProptestConfig::with_cases(300)
    });
    // Half of the time also the superblock and the group descriptors, without which nothing can be read.
    let sector = prop_oneof![1 => (2_usize..18).prop_map(Err), 8 => any::<prop::sample::Index>().prop_map(Ok)];
    let strategy = prop::collection::vec((sector, 0_usize..512, any::<u8>()), 1..24);
    runner
        .run(&strategy, |damage| {
            let at = |sector: &Result<prop::sample::Index, usize>, offset: usize| {
                let sector = sector.map_or_else(|fixed| fixed, |index| used[index.index(used.len())]);
                (sector * 512 + offset) as u64
            };
            for (index, offset, byte) in &damage {
                file.write_all_at(&[*byte], at(index, *offset)).unwrap();
            }
            let patience = Patience { deadline: Some(Instant::now() + Duration::from_secs(10)), ..Patience::default() };
            let compared =
                Ext4Image::open(File::open(&copy).unwrap(), patience).and_then(|new| compare(&old, &new, &[], BOUNDS));
            match compared {
                Ok(changes) => {
                    prop_assert_ne!(changes.missing, Some(Missing::TooSlow));
                    answered.set(answered.get() + 1);
                }
                Err(Ext4ReadError::Stopped) => prop_assert!(false, "it went on for ever"),
                Err(_) => {}
            }
            for (index, offset, _) in &damage {
                let place = at(index, *offset);
                file.write_all_at(&[bytes[usize::try_from(place).unwrap()]], place).unwrap();
            }
            Ok(())
        })
        .unwrap();
    let answered = answered.get();
    assert!(answered > 50, "only {answered} of 300 could be compared");
}

type Tree = BTreeMap<String, Option<Vec<u8>>>;

fn tree() -> impl Strategy<Value = Tree> {
    let name = prop::sample::select(vec!["a", "b", "c", "d/a", "d/b", "d/e/f", "g/h", "A", "é"]);
    let content = prop::option::of(prop::collection::vec(any::<u8>(), 0..3));
    prop::collection::btree_map(name.prop_map(str::to_owned), content, 0..8)
}

/// Files, and empty directories; answers all that is there then.
fn make(root: &Path, tree: &Tree) -> Tree {
    fs::create_dir(root).unwrap();
    let mut there = Tree::new();
    for (name, content) in tree {
        for (at, _) in name.match_indices('/') {
            there.insert(format!("/{}", &name[..at]), None);
        }
        let path = root.join(name);
        match content {
            Some(content) => {
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, content).unwrap();
            }
            None => fs::create_dir_all(path).unwrap(),
        }
        there.insert(format!("/{name}"), content.clone());
    }
    there
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]
    #[test]
    fn any_two_trees_are_told_apart_exactly(old in tree(), new in tree()) {
        let dir = tempfile::tempdir().unwrap();
        let (old, new) = (make(&dir.path().join("1"), &old), make(&dir.path().join("2"), &new));
        let images = (build(&dir.path().join("1"), &dir.path().join("old")), build(&dir.path().join("2"), &dir.path().join("new")));
        // A file of the same inode, length and time is taken for the same; the tool that builds images counts whole seconds.
        let later: String = new.keys().map(|path| format!("sif {path} ctime 20300101000000\n")).collect();
        let changes = all(&images.0, &edit(&images.1, &dir.path().join("later"), &later));
        let paths = |list: &List| list.entries.iter().map(|e| String::from_utf8(e.path.clone()).unwrap()).collect::<Vec<_>>();
        let only = |a: &Tree, b: &Tree| {
            let mut only: Vec<String> = a.keys().filter(|path| !b.contains_key(*path)).cloned().collect();
            // In the order of a walk, in which what is in a directory comes before what comes after it.
            only.sort_by_key(|path| path.split('/').map(str::to_owned).collect::<Vec<_>>());
            only
        };
        prop_assert_eq!(paths(&changes.added), only(&new, &old));
        prop_assert_eq!(paths(&changes.deleted), only(&old, &new));
        let differ: Vec<String> = old.iter().filter(|(path, was)| new.get(*path).is_some_and(|is| is != *was)).map(|(path, _)| path.clone()).collect();
        let mut modified = paths(&changes.modified);
        modified.sort();
        prop_assert_eq!(modified, differ);
    }
}
