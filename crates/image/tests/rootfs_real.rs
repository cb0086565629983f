//! Building a root file system with the real tools: what a mistake in a recipe leaves behind.

use std::path::Path;

use coppice_disk::Quiet;
use coppice_image::{Cache, Recipes, RootfsError, prepare_rootfs};

#[test]
fn a_release_that_does_not_exist_is_an_error_with_the_tail_of_the_log_and_leaves_only_the_log() {
    if !rustix::process::geteuid().is_root() {
        println!("skipped, because not root");
        return;
    }
    if !Path::new("/usr/bin/mmdebstrap").exists() {
        println!("skipped, because mmdebstrap is not installed");
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("recipes/mine");
    std::fs::create_dir_all(&dir).unwrap();
    std::fs::write(dir.join("recipe.toml"), "name='mine'\nlabel='M'\nsuite='coppice-no-such-release'\n").unwrap();
    let mut recipes = Recipes::builtin();
    recipes.add_dir(&temp.path().join("recipes")).unwrap();
    let cache_dir = temp.path().join("cache");
    let cache = Cache::open(&cache_dir).unwrap();
    let error = prepare_rootfs(&cache, &recipes.resolve("mine").unwrap(), false, &Quiet).unwrap_err();
    let RootfsError::Build { template, source } = &error else { panic!("{error:?}") };
    assert_eq!(template, "mine");
    assert!(source.to_string().contains("\n  | "), "{source}");
    for empty in ["staging", "rootfs"] {
        assert_eq!(std::fs::read_dir(cache_dir.join(empty)).unwrap().count(), 0, "{empty}");
    }
    assert_eq!(std::fs::read_dir(cache_dir.join("logs")).unwrap().count(), 1);
    let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
    assert!(!mounts.contains(&*temp.path().to_string_lossy()), "{mounts}");
}
