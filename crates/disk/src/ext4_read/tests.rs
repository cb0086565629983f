use std::fs::{self, File};
use std::os::unix::fs::FileExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use super::testing::{build, edit, open};
use super::*;
use crate::Quiet;
use crate::command::Command;

/// The inode that a path leads to.
fn find(image: &Ext4Image, path: &str) -> Option<Inode> {
    path.split('/').filter(|name| !name.is_empty()).try_fold(image.inode(ROOT).unwrap(), |directory, name| {
        let names = image.names(&directory, 10_000).unwrap();
        let found = names.iter().find(|found| found.name == name.as_bytes())?;
        Some(image.inode(found.inode).unwrap())
    })
}

fn content(image: &Ext4Image, path: &str) -> Vec<u8> {
    let inode = find(image, path).unwrap();
    let mut content = vec![0xAA; usize::try_from(inode.size).unwrap()];
    image.read_content(&image.extents(&inode).unwrap(), 0, &mut content).unwrap();
    content
}

#[test]
fn files_links_large_directories_and_holes_are_read_as_they_were_written() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir_all(tree.join("many")).unwrap();
    for number in 0..2000 {
        fs::write(tree.join(format!("many/a-rather-long-name-{number:04}")), format!("{number}")).unwrap();
    }
    let holes = File::create(tree.join("holes")).unwrap();
    // More pieces than the inode has room for: a tree of extents with a second level.
    for piece in 0..40_u64 {
        holes.write_all_at(&[u8::try_from(piece).unwrap() + 1; 5000], piece * 20_000).unwrap();
    }
    holes.set_len(1 << 30).unwrap();
    std::os::unix::fs::symlink("/etc/shadow", tree.join("short")).unwrap();
    std::os::unix::fs::symlink("x".repeat(300), tree.join("long")).unwrap();
    let image = build(&tree, &dir.path().join("image"));
    // As a kernel would have it: with an index.
    drop(Command::new("e2fsck").args(["-fyD"]).arg(&image).run(&Quiet));

    let image = open(&image);
    assert!(!image.was_replayed());
    let names = image.names(&find(&image, "/many").unwrap(), 3000).unwrap();
    assert_eq!(names.len(), 2000);
    assert!(matches!(image.names(&find(&image, "/many").unwrap(), 1999), Err(Ext4ReadError::TooMany)));
    assert_eq!(content(&image, "/many/a-rather-long-name-1234"), b"1234");
    assert_eq!(image.target(&find(&image, "/short").unwrap()).unwrap(), b"/etc/shadow");
    assert_eq!(image.target(&find(&image, "/long").unwrap()).unwrap(), "x".repeat(300).as_bytes());
    let holes = find(&image, "/holes").unwrap();
    assert_eq!(holes.size, 1 << 30);
    let extents = image.extents(&holes).unwrap();
    assert!(extents.len() >= 40, "{}", extents.len());
    let mut read = vec![0xAA; 800_000];
    image.read_content(&extents, 0, &mut read).unwrap();
    let mut expected = vec![0; 800_000];
    for piece in 0..40 {
        expected[piece * 20_000..piece * 20_000 + 5000].fill(u8::try_from(piece).unwrap() + 1);
    }
    assert!(read == expected);
}

/// A log as a kernel writes it, without checksums.
struct LogWriter<'a> {
    file: &'a File,
    blocks: Vec<u64>,
    at: usize,
    sequence: u32,
}

impl LogWriter<'_> {
    fn put(&mut self, block: &[u8]) {
        self.file.write_all_at(block, self.blocks[self.at] * 4096).unwrap();
        self.at = if self.at + 1 == self.blocks.len() { 1 } else { self.at + 1 };
    }

    fn head(&self, kind: u32) -> Vec<u8> {
        [MAGIC, kind, self.sequence].iter().flat_map(|word| word.to_be_bytes()).collect()
    }

    fn put_padded(&mut self, mut block: Vec<u8>) {
        block.resize(4096, 0);
        self.put(&block);
    }

    /// One transaction, with its end if it is complete.
    fn transaction(&mut self, logged: &[(u64, Vec<u8>)], revoked: &[u64], complete: bool) {
        if !revoked.is_empty() {
            let mut block = self.head(5);
            block.extend(u32::try_from(16 + revoked.len() * 8).unwrap().to_be_bytes());
            block.extend(revoked.iter().flat_map(|block| block.to_be_bytes()));
            self.put_padded(block);
        }
        if !logged.is_empty() {
            let mut block = self.head(1);
            for (index, (target, content)) in logged.iter().enumerate() {
                let escaped = u16::from(content.starts_with(&MAGIC.to_be_bytes()));
                let flags = escaped | (u16::from(index > 0) * 2) | (u16::from(index + 1 == logged.len()) * 8);
                block.extend(u32::try_from(target & 0xFFFF_FFFF).unwrap().to_be_bytes());
                block.extend(0_u16.to_be_bytes());
                block.extend(flags.to_be_bytes());
                block.extend(u32::try_from(target >> 32).unwrap().to_be_bytes());
                if index == 0 {
                    block.extend([0; 16]);
                }
            }
            self.put_padded(block);
            for (_, content) in logged {
                let mut content = content.clone();
                if content.starts_with(&MAGIC.to_be_bytes()) {
                    content[..4].fill(0);
                }
                self.put_padded(content);
            }
        }
        if complete {
            self.put_padded(self.head(2));
            self.sequence += 1;
        }
    }
}

const MAGIC: u32 = journal::MAGIC;

/// A log that begins so many blocks before the end of the journal.
fn with_log(image: &Path, before_end: usize, write: impl FnOnce(&mut LogWriter<'_>)) {
    let reader = open(image);
    let journal = reader.inode(reader.superblock.journal_inode).unwrap();
    let extents = reader.extents(&journal).unwrap();
    let blocks: Vec<u64> =
        extents.iter().flat_map(|extent| extent.physical()..extent.physical() + extent.blocks).collect();
    let file = File::options().read(true).write(true).open(image).unwrap();
    let start = blocks.len() - before_end;
    // Revocations and 64 bit; where the log begins, and with what.
    for (at, value) in [(40, 3), (24, 70), (28, u32::try_from(start).unwrap())] {
        file.write_all_at(&u32::to_be_bytes(value), blocks[0] * 4096 + at).unwrap();
    }
    write(&mut LogWriter { file: &file, blocks, at: start, sequence: 70 });
    drop(file);
    // The mark that there is something to replay, with the checksum right.
    let script = image.with_extension("mark");
    fs::write(&script, "feature needs_recovery\n").unwrap();
    Command::new("debugfs").args(["-w", "-f"]).args([&script, &image.to_owned()]).run(&Quiet).unwrap();
}

fn block_of(image: &Ext4Image, path: &str) -> u64 {
    image.extents(&find(image, path).unwrap()).unwrap()[0].physical()
}

#[test]
fn a_journal_is_replayed_as_e2fsck_does_around_its_end_with_revocations() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir(&tree).unwrap();
    for name in ["a", "b", "c", "d", "e"] {
        fs::write(tree.join(name), vec![name.as_bytes()[0]; 4096]).unwrap();
    }
    let image = build(&tree, &dir.path().join("image"));
    let clean = open(&image);
    let [a, b, c, d, e] = ["/a", "/b", "/c", "/d", "/e"].map(|path| block_of(&clean, path));
    let filled = |byte: u8| vec![byte; 4096];
    let mut magic = filled(b'!');
    magic[..4].copy_from_slice(&MAGIC.to_be_bytes());
    with_log(&image, 3, |log| {
        // Reaches around the end of the journal.
        log.transaction(&[(a, filled(b'1')), (b, filled(b'2')), (c, filled(b'3'))], &[], true);
        // Revoked for what came before, and logged again afterwards.
        log.transaction(&[(d, magic.clone())], &[b, c], true);
        log.transaction(&[(c, filled(b'4')), (a, filled(b'5'))], &[], true);
        // Its end was never written.
        log.transaction(&[(e, filled(b'6'))], &[a], false);
    });
    let recovered = dir.path().join("recovered");
    fs::copy(&image, &recovered).unwrap();
    // Status 1: errors were corrected.
    drop(Command::new("e2fsck").args(["-fy"]).arg(&recovered).run(&Quiet));
    let (image, recovered) = (open(&image), open(&recovered));
    assert!(image.was_replayed() && !recovered.was_replayed());
    let expected =
        [("/a", filled(b'5')), ("/b", filled(b'b')), ("/c", filled(b'4')), ("/d", magic), ("/e", filled(b'e'))];
    for (path, expected) in expected {
        assert!(content(&recovered, path) == expected, "e2fsck, {path}");
        assert!(content(&image, path) == expected, "{path}");
    }
}

#[test]
fn journals_with_checksums_are_replayed_too() {
    let dir = tempfile::tempdir().unwrap();
    let tree = dir.path().join("tree");
    fs::create_dir(&tree).unwrap();
    fs::write(tree.join("f"), vec![b'f'; 4096]).unwrap();
    fs::write(dir.path().join("block"), vec![b'+'; 4096]).unwrap();
    let image = build(&tree, &dir.path().join("image"));
    let block = block_of(&open(&image), "/f");
    let log = format!("jo -c\njw -b {block} {}\njc\n", dir.path().join("block").display());
    let image = edit(&image, &dir.path().join("logged"), &log);
    assert!(content(&open(&image), "/f") == vec![b'+'; 4096]);
}

#[test]
fn what_is_not_such_a_file_system_is_refused_by_name() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("image");
    let file = File::options().read(true).write(true).create_new(true).open(&path).unwrap();
    let attempt = || Ext4Image::open(File::open(&path).unwrap(), Patience::default());
    assert!(matches!(attempt(), Err(Ext4ReadError::Io(_))), "an empty file");
    file.set_len(1 << 20).unwrap();
    assert!(matches!(attempt(), Err(Ext4ReadError::Unsupported(_))), "zeros");
    let image = empty(dir.path());
    let real = File::options().read(true).write(true).open(&image).unwrap();
    // A feature that nobody has heard of.
    real.write_all_at(&0x8000_0000_u32.to_le_bytes(), 1024 + 0x60).unwrap();
    assert!(matches!(
        Ext4Image::open(File::open(&image).unwrap(), Patience::default()),
        Err(Ext4ReadError::Unsupported(_))
    ));
}

/// An image with nothing in it.
fn empty(dir: &Path) -> std::path::PathBuf {
    fs::create_dir(dir.join("tree")).unwrap();
    build(&dir.join("tree"), &dir.join("empty"))
}

#[test]
fn patience_has_an_end() {
    let dir = tempfile::tempdir().unwrap();
    let image = empty(dir.path());
    let patience = Patience { deadline: Some(Instant::now() + Duration::from_secs(600)), ..Patience::default() };
    let reader = Ext4Image::open(File::open(&image).unwrap(), patience.clone()).unwrap();
    reader.inode(ROOT).unwrap();
    patience.stop.store(true, Ordering::Relaxed);
    assert!(matches!(reader.inode(ROOT), Err(Ext4ReadError::Stopped)));
    let late = Patience { deadline: Some(Instant::now()), ..Patience::default() };
    let reader = Ext4Image::open(File::open(&image).unwrap(), late).unwrap();
    assert!(matches!(reader.inode(ROOT), Err(Ext4ReadError::Stopped)));
}
