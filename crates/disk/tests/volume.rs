//! The XFS volume with real loop devices and mounts; skipped, with the reason, where those cannot be had.

use std::path::Path;

use coppice_disk::volume::{MIN_SIZE, trim};
use coppice_disk::{
    CloneKind, DataDir, Quiet, VolumeError, VolumeSpec, VolumeState, clone_file, detach, ensure_volume, free_space,
};

/// Why a loop volume cannot be had here.
fn missing() -> Option<&'static str> {
    if !rustix::process::geteuid().is_root() {
        return Some("not root");
    }
    if !Path::new("/dev/loop-control").exists() {
        return Some("no /dev/loop-control");
    }
    let xfs = std::fs::read_to_string("/proc/filesystems").unwrap_or_default();
    if !xfs.contains("\txfs") {
        return Some("this kernel has no XFS (or has not loaded it)");
    }
    None
}

/// The loop devices that have a file below `dir` attached.
fn loops_below(dir: &Path) -> Vec<String> {
    std::fs::read_dir("/sys/block")
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| std::fs::read_to_string(entry.path().join("loop/backing_file")).ok())
        .filter(|backing| Path::new(backing.trim()).starts_with(dir))
        .collect()
}

/// Unmounts on every way out of a test.
struct Detach<'a>(&'a Path, &'a VolumeSpec);
impl Drop for Detach<'_> {
    fn drop(&mut self) {
        if let Err(error) = detach(self.0, self.1) {
            eprintln!("cleaning up: {error}");
        }
    }
}

#[test]
fn a_directory_without_reflink_gets_a_volume_and_loses_it_without_a_trace() {
    if let Some(why) = missing() {
        println!("skipped, because {why}");
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let below = temp.path().canonicalize().unwrap();
    let dir = below.join("data");
    let spec = VolumeSpec { image: None, size: 512 << 20 };
    let first = ensure_volume(&dir, &spec, &Quiet).unwrap();
    if first == VolumeState::Ready {
        println!("skipped, because the temporary directory shares extents by itself");
        return;
    }
    let guard = Detach(&dir, &spec);
    let image = below.join("data.xfs");
    assert_eq!(first, VolumeState::Mounted { image: image.clone(), created: true });
    assert_eq!(ensure_volume(&dir, &spec, &Quiet).unwrap(), VolumeState::Ready, "idempotent");
    assert_eq!(loops_below(&below).len(), 1);

    let data = DataDir::open(&dir).unwrap();
    assert!(data.reflink());
    let file = data.root().join("file");
    std::fs::write(&file, vec![3; 4 << 20]).unwrap();
    assert_eq!(clone_file(&file, &data.root().join("clone")).unwrap(), CloneKind::Reflink);
    assert!(data.space().unwrap().available <= free_space(&below).unwrap().available);
    trim(&dir, &Quiet).unwrap();

    // As after a reboot: not mounted, the image is there, and so is what it holds.
    assert!(detach(&dir, &spec).unwrap());
    assert!(!detach(&dir, &spec).unwrap());
    assert!(loops_below(&below).is_empty(), "{:?}", loops_below(&below));
    assert_eq!(
        ensure_volume(&dir, &spec, &Quiet).unwrap(),
        VolumeState::Mounted { image: image.clone(), created: false }
    );
    assert_eq!(std::fs::read(&file).unwrap().len(), 4 << 20);
    drop(guard);
    assert!(loops_below(&below).is_empty());
}

#[test]
fn a_failed_mount_leaves_no_loop_device_and_keeps_an_image_that_was_there() {
    if let Some(why) = missing() {
        println!("skipped, because {why}");
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let below = temp.path().canonicalize().unwrap();
    let dir = below.join("data");
    let image = below.join("data.xfs");
    let damaged = std::fs::File::create(&image).unwrap();
    damaged.set_len(MIN_SIZE).unwrap();
    match ensure_volume(&dir, &VolumeSpec::default(), &Quiet) {
        Ok(VolumeState::Ready) => println!("skipped, because the temporary directory shares extents by itself"),
        Err(VolumeError::Mount { .. }) => {}
        other => panic!("{other:?}"),
    }
    assert!(image.exists());
    assert!(loops_below(&below).is_empty());
}

#[test]
fn files_are_never_hidden_under_a_mount() {
    if let Some(why) = missing() {
        println!("skipped, because {why}");
        return;
    }
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("data");
    std::fs::create_dir(&dir).unwrap();
    std::fs::write(dir.join("precious"), "x").unwrap();
    match ensure_volume(&dir, &VolumeSpec::default(), &Quiet) {
        Ok(VolumeState::Ready) => println!("skipped, because the temporary directory shares extents by itself"),
        Err(VolumeError::NotEmpty { .. }) => {}
        other => panic!("{other:?}"),
    }
    assert!(!temp.path().join("data.xfs").exists());
}

#[test]
fn a_tiny_size_is_refused() {
    let temp = tempfile::tempdir().unwrap();
    let spec = VolumeSpec { image: None, size: 1 << 20 };
    assert!(matches!(ensure_volume(&temp.path().join("d"), &spec, &Quiet), Err(VolumeError::TooSmall { .. })));
}
