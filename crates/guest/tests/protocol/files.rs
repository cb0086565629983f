//! Files, through the protocol, below a temporary directory.
#![expect(clippy::unwrap_used, reason = "test helpers")]

use std::{
    fs,
    os::unix::fs::{MetadataExt, PermissionsExt, symlink},
    path::Path,
    time::Duration,
};

use crate::common::{Guest, until, within};
use coppice_guest_proto::v1::{self, FileType, guest_client::GuestClient, write_file_input::Input};
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Status, transport::Channel};

type Client = GuestClient<Channel>;

async fn read(client: &mut Client, path: &str, offset: u64, length: u64) -> Result<(Vec<u8>, u64), Status> {
    let request = v1::ReadFileRequest { path: path.into(), offset, length };
    let mut chunks = client.read_file(request).await?.into_inner();
    let first = chunks.message().await?.unwrap();
    let (mut data, size) = (first.data, first.size);
    while let Some(chunk) = chunks.message().await? {
        assert!(!chunk.data.is_empty() && chunk.data.len() <= coppice_guest_proto::limits::CHUNK);
        data.extend(chunk.data);
    }
    Ok((data, size))
}

fn part(input: Input) -> v1::WriteFileInput {
    v1::WriteFileInput { input: Some(input) }
}

async fn write(client: &mut Client, path: &str, mode: u32, data: &[u8]) -> Result<u64, Status> {
    let start = Input::Start(v1::WriteFileStart { path: path.into(), mode });
    let parts: Vec<_> = std::iter::once(start)
        .chain(data.chunks(65_536).map(|chunk| Input::Data(chunk.to_vec())))
        .chain([Input::End(v1::WriteFileEnd {})])
        .map(part)
        .collect();
    Ok(client.write_file(tokio_stream::iter(parts)).await?.into_inner().bytes)
}

async fn list(client: &mut Client, path: &str) -> Result<Vec<v1::DirEntry>, Status> {
    let mut batches = client.list_dir(v1::ListDirRequest { path: path.into() }).await?.into_inner();
    let mut all = Vec::new();
    while let Some(batch) = batches.message().await? {
        all.extend(batch.entries);
    }
    all.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(all)
}

async fn stat(client: &mut Client, path: &str) -> Result<v1::DirEntry, Status> {
    Ok(client.stat(v1::StatRequest { path: path.into() }).await?.into_inner())
}

async fn remove(client: &mut Client, path: &str) -> Result<(), Status> {
    client.remove(v1::RemoveRequest { path: path.into() }).await.map(drop)
}

fn code<T>(result: Result<T, Status>) -> Code {
    result.err().map_or(Code::Ok, |status| status.code())
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_written_is_read_in_whole_and_in_part() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let data: Vec<u8> = (0..1_000_000u32).map(|i| u8::try_from(i % 251).unwrap()).collect();
    assert_eq!(write(&mut client, "/a/b/c/file", 0, &data).await.unwrap(), 1_000_000);
    assert_eq!(read(&mut client, "/a/b/c/file", 0, 0).await.unwrap(), (data.clone(), 1_000_000));
    assert_eq!(read(&mut client, "/a/b/c/file", 70_000, 100_000).await.unwrap().0, data[70_000..170_000]);
    assert_eq!(read(&mut client, "/a/b/c/file", 999_999, 10).await.unwrap().0, data[999_999..]);
    assert_eq!(read(&mut client, "/a/b/c/file", 1 << 40, 0).await.unwrap(), (vec![], 1_000_000));
    assert_eq!(write(&mut client, "/empty", 0, b"").await.unwrap(), 0);
    assert_eq!(read(&mut client, "/empty", 0, 0).await.unwrap(), (vec![], 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn only_regular_files_are_read_and_nothing_blocks() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let root = guest.root.path();
    rustix::fs::mkfifoat(rustix::fs::CWD, root.join("fifo"), rustix::fs::Mode::RUSR).unwrap();
    let _socket = std::os::unix::net::UnixListener::bind(root.join("socket")).unwrap();
    fs::create_dir(root.join("dir")).unwrap();
    symlink("/dev/zero", root.join("zero")).unwrap();
    symlink("/proc/self/status", root.join("status")).unwrap();
    for (path, expected) in [
        ("/missing", Code::NotFound),
        ("/missing/below", Code::NotFound),
        ("/dir", Code::FailedPrecondition),
        ("/fifo", Code::FailedPrecondition),
        ("/socket", Code::FailedPrecondition),
        ("/zero", Code::FailedPrecondition),
        ("relative", Code::InvalidArgument),
        ("", Code::InvalidArgument),
        ("/a\0b", Code::InvalidArgument),
        ("/fifo/below", Code::FailedPrecondition),
    ] {
        let result = within(Duration::from_secs(2), read(&mut client, path, 0, 0)).await;
        assert_eq!(code(result), expected, "{path:?}");
    }
    // A file in /proc says that it is empty, and isn't.
    let (data, size) = read(&mut client, "/status", 0, 0).await.unwrap();
    assert!(data.starts_with(b"Name:") && size == 0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_replaced_file_keeps_mode_and_owner() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let file = guest.root.path().join("script");
    write(&mut client, "/script", 0, b"1").await.unwrap();
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o644);
    fs::set_permissions(&file, fs::Permissions::from_mode(0o4751)).unwrap();
    let root = rustix::process::geteuid().is_root();
    if root {
        std::os::unix::fs::chown(&file, Some(1234), Some(4321)).unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o4751)).unwrap();
    } else {
        eprintln!("skipped, because not root: keeping another owner");
    }
    write(&mut client, "/script", 0, b"2").await.unwrap();
    let metadata = fs::metadata(&file).unwrap();
    assert_eq!(metadata.mode() & 0o7777, 0o4751);
    if root {
        assert_eq!((metadata.uid(), metadata.gid()), (1234, 4321));
    }
    write(&mut client, "/script", 0o600, b"3").await.unwrap();
    assert_eq!(fs::metadata(&file).unwrap().mode() & 0o7777, 0o600);
    assert_eq!(fs::read(&file).unwrap(), b"3");
    assert_eq!(code(write(&mut client, "/script", 0o10_000, b"").await), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn writing_follows_links_and_refuses_what_is_no_file() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let root = guest.root.path();
    fs::create_dir(root.join("dir")).unwrap();
    fs::write(root.join("dir/target"), "old").unwrap();
    symlink("dir/target", root.join("link")).unwrap();
    symlink("dir/new", root.join("dangling")).unwrap();
    symlink("loop", root.join("loop")).unwrap();
    rustix::fs::mkfifoat(rustix::fs::CWD, root.join("fifo"), rustix::fs::Mode::RUSR).unwrap();
    write(&mut client, "/link", 0, b"new").await.unwrap();
    write(&mut client, "/dangling", 0, b"new").await.unwrap();
    assert!(fs::symlink_metadata(root.join("link")).unwrap().is_symlink());
    assert_eq!(names(&root.join("dir")), ["new", "target"]);
    assert_eq!(fs::read(root.join("dir/target")).unwrap(), b"new");
    for path in ["/dir", "/dir/", "/new/", "/fifo", "/loop", "/dir/target/below", "/"] {
        assert_eq!(code(write(&mut client, path, 0, b"x").await), Code::FailedPrecondition, "{path}");
    }
    let twice = [Input::Data(vec![1])].map(part);
    assert_eq!(code(client.write_file(tokio_stream::iter(twice)).await), Code::InvalidArgument);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_cancelled_or_failed_write_leaves_nothing() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let root = guest.root.path().to_owned();
    fs::create_dir(root.join("d")).unwrap();
    fs::write(root.join("d/file"), "old").unwrap();
    let (tx, rx) = mpsc::channel(2);
    let start = Input::Start(v1::WriteFileStart { path: "/d/file".into(), mode: 0 });
    tx.send(part(start.clone())).await.unwrap();
    tx.send(part(Input::Data(vec![1; 65_536]))).await.unwrap();
    let mut writer = client.clone();
    let call = tokio::spawn(async move { writer.write_file(ReceiverStream::new(rx)).await });
    until(|| names(&root.join("d")).len() == 2).await;
    call.abort();
    drop(tx);
    until(|| names(&root.join("d")) == ["file"]).await;
    // A sender that breaks off: its stream ends, without `end`.
    let parts = [start.clone(), Input::Data(vec![1])].map(part);
    assert_eq!(code(client.write_file(tokio_stream::iter(parts)).await), Code::InvalidArgument);
    until(|| names(&root.join("d")) == ["file"]).await;
    assert!(fs::read(root.join("d/file")).unwrap() == b"old");
    // A second start is an error in the middle.
    let parts = [start.clone(), Input::Data(vec![1]), start].map(part);
    assert_eq!(code(client.write_file(tokio_stream::iter(parts)).await), Code::InvalidArgument);
    until(|| names(&root.join("d")) == ["file"]).await;
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_named() {
    if !rustix::process::geteuid().is_root() {
        eprintln!("skipped, because not root: can't mount a small tmpfs");
        return;
    }
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let small = guest.root.path().join("small");
    fs::create_dir(&small).unwrap();
    let mounted = rustix::mount::mount("tmpfs", &small, "tmpfs", rustix::mount::MountFlags::empty(), Some(c"size=1m"));
    if let Err(error) = mounted {
        eprintln!("skipped, because tmpfs can't be mounted here: {error}");
        return;
    }
    let status = write(&mut client, "/small/file", 0, &vec![1; 3 << 20]).await.unwrap_err();
    let left = names(&small);
    rustix::mount::unmount(&small, rustix::mount::UnmountFlags::DETACH).unwrap();
    assert_eq!(status.code(), Code::ResourceExhausted);
    assert!(status.message().contains("no space left on the sandbox's disk"), "{status:?}");
    assert!(left.len() <= 1 && !left.contains(&"file".to_owned()));
}

#[tokio::test(flavor = "multi_thread")]
async fn listing_and_stat_describe_links_themselves() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let root = guest.root.path();
    fs::write(root.join("file"), "12345").unwrap();
    fs::create_dir(root.join("many")).unwrap();
    symlink("nowhere", root.join("link")).unwrap();
    for i in 0..1000 {
        fs::write(root.join(format!("many/{i:04}")), "").unwrap();
    }
    fs::write(root.join("many/\u{fffd}"), "").unwrap();
    let all = list(&mut client, "/many").await.unwrap();
    assert_eq!(all.len(), 1001);
    assert_eq!(all[7].name, b"0007");
    assert!(list(&mut client, "/many/../many/").await.is_ok());
    let link = stat(&mut client, "/link").await.unwrap();
    assert_eq!((link.r#type(), link.name.as_slice()), (FileType::Symlink, &b"link"[..]));
    let file = stat(&mut client, "/file").await.unwrap();
    assert_eq!((file.r#type(), file.size), (FileType::Regular, 5));
    assert_eq!(stat(&mut client, "/").await.unwrap().r#type(), FileType::Directory);
    assert_eq!(code(stat(&mut client, "/none").await), Code::NotFound);
    assert_eq!(code(list(&mut client, "/none").await), Code::NotFound);
    assert_eq!(code(list(&mut client, "/file").await), Code::FailedPrecondition);
    fs::create_dir(root.join("empty")).unwrap();
    assert!(list(&mut client, "/empty").await.unwrap().is_empty());
    // A batch that is exactly full is not followed by an error.
    fs::create_dir(root.join("full")).unwrap();
    for i in 0..256 {
        fs::write(root.join(format!("full/{i}")), "").unwrap();
    }
    assert_eq!(list(&mut client, "/full").await.unwrap().len(), 256);
}

#[tokio::test(flavor = "multi_thread")]
async fn removing_follows_no_links_and_any_depth() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    let root = guest.root.path();
    fs::create_dir_all(root.join("keep/sub")).unwrap();
    fs::write(root.join("keep/sub/file"), "x").unwrap();
    fs::create_dir_all(root.join("tree/a/b")).unwrap();
    symlink("../keep", root.join("tree/link")).unwrap();
    symlink("../../keep", root.join("tree/a/link")).unwrap();
    symlink("keep", root.join("top-link")).unwrap();
    for i in 0..5000 {
        fs::write(root.join(format!("tree/a/b/{i}")), "").unwrap();
    }
    // Deeper than any path may be long.
    let mut dir = rustix::fs::openat(
        rustix::fs::CWD,
        root.join("tree"),
        rustix::fs::OFlags::DIRECTORY,
        rustix::fs::Mode::empty(),
    )
    .unwrap();
    for _ in 0..3000 {
        rustix::fs::mkdirat(&dir, "deeper", rustix::fs::Mode::RWXU).unwrap();
        dir = rustix::fs::openat(&dir, "deeper", rustix::fs::OFlags::DIRECTORY, rustix::fs::Mode::empty()).unwrap();
    }
    remove(&mut client, "/tree").await.unwrap();
    remove(&mut client, "/top-link/").await.unwrap();
    assert_eq!(names(root).iter().filter(|name| *name == "keep" || *name == "top-link" || *name == "tree").count(), 1);
    assert!(root.join("keep/sub/file").exists());
    assert_eq!(code(remove(&mut client, "/tree").await), Code::NotFound);
    remove(&mut client, "/keep/sub/file").await.unwrap();
    remove(&mut client, "/keep").await.unwrap();
    for path in ["/", "/..", "/keep/..", "x"] {
        assert_eq!(code(remove(&mut client, path).await), Code::InvalidArgument, "{path}");
    }
    assert!(root.exists());
}

#[tokio::test(flavor = "multi_thread")]
async fn readers_that_stop_reading_hold_up_nobody() {
    let guest = Guest::new();
    let mut client = guest.resumed().await;
    fs::write(guest.root.path().join("big"), vec![0; 20 << 20]).unwrap();
    let mut stalled = Vec::new();
    // Not so many that their flow-control windows fill that of the connection.
    for _ in 0..7 {
        let request = v1::ReadFileRequest { path: "/big".into(), offset: 0, length: 0 };
        stalled.push(client.read_file(request).await.unwrap().into_inner());
    }
    tokio::time::sleep(Duration::from_millis(200)).await;
    within(Duration::from_secs(2), write(&mut client, "/small", 0, b"x")).await.unwrap();
    assert_eq!(within(Duration::from_secs(2), read(&mut client, "/small", 0, 0)).await.unwrap().0, b"x");
}
