//! Images for tests, made and changed by e2fsprogs.

use std::fs::File;
use std::path::{Path, PathBuf};

use super::{Ext4Image, Patience};
use crate::Quiet;
use crate::command::Command;

/// The features of the images that Coppice makes.
const FEATURES: &str = "none,has_journal,ext_attr,resize_inode,dir_index,filetype,extent,64bit,flex_bg,sparse_super,\
                        large_file,huge_file,dir_nlink,extra_isize,metadata_csum";

/// A small image of a tree.
pub(crate) fn build(tree: &Path, image: &Path) -> PathBuf {
    File::create(image).unwrap().set_len(24 << 20).unwrap();
    Command::new("mke2fs")
        .args(["-q", "-F", "-t", "ext4", "-O", FEATURES, "-b", "4096", "-I", "256", "-N", "6000", "-J", "size=4", "-d"])
        .args([tree, image])
        .env("MKE2FS_CONFIG", "/dev/null")
        .run(&Quiet)
        .unwrap();
    image.to_owned()
}

/// A copy of an image, changed by requests to debugfs, one a line. Does what a guest's kernel would, and what none would.
pub(crate) fn edit(image: &Path, copy: &Path, requests: &str) -> PathBuf {
    std::fs::copy(image, copy).unwrap();
    let script = copy.with_extension("debugfs");
    std::fs::write(&script, requests).unwrap();
    let said = Command::new("debugfs").args(["-w", "-f"]).args([&script, &copy.to_owned()]).run(&Quiet).unwrap();
    let failed = said.iter().find(|line| line.contains("not found") || line.contains("while "));
    assert!(failed.is_none(), "{said:#?}");
    copy.to_owned()
}

pub(crate) fn open(image: &Path) -> Ext4Image {
    Ext4Image::open(File::open(image).unwrap(), Patience::default()).unwrap()
}
