//! How sessions start and end on a stream.

use std::time::Duration;

use crate::common::{Guest, client, hello, run, sh, welcome, within};
use coppice_guest_proto::{
    session::{Hello, PREAMBLE_LEN},
    v1,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tonic::Code;
use uuid::Uuid;

const SOON: Duration = Duration::from_secs(10);

#[tokio::test]
async fn nothing_but_info_before_the_handshake() {
    let guest = Guest::new();
    let mut client = guest.session().await;
    let info = client.info(v1::InfoRequest {}).await.unwrap().into_inner();
    assert!(info.generation.is_empty() && !info.kernel_release.is_empty());
    assert_eq!(run(&mut client, sh("true")).await.unwrap_err().code(), Code::FailedPrecondition);
    let stat = client.stat(v1::StatRequest { path: "/".into() }).await.unwrap_err();
    assert_eq!(stat.code(), Code::FailedPrecondition);
    let thaw = client.thaw(v1::ThawRequest {}).await.unwrap_err();
    assert_eq!(thaw.code(), Code::FailedPrecondition);
    client.resume(crate::common::resume_request()).await.unwrap();
    assert_eq!(run(&mut client, sh("echo ok")).await.unwrap().text(), "ok");
}

#[tokio::test]
async fn garbage_before_a_hello_is_skipped() {
    let guest = Guest::new();
    let mut stream = guest.stream();
    stream.write_all(&[b'C'; 100_000]).await.unwrap();
    stream.write_all(&Hello { session: Uuid::new_v4() }.encode()[..20]).await.unwrap();
    within(SOON, hello(&mut stream)).await.unwrap();
    client(stream).await.info(v1::InfoRequest {}).await.unwrap();
}

#[tokio::test]
async fn the_last_of_several_hellos_is_answered() {
    let guest = Guest::new();
    let mut stream = guest.stream();
    let session = Uuid::new_v4();
    let mut bytes = Hello { session: Uuid::new_v4() }.encode().to_vec();
    bytes.extend(Hello { session }.encode());
    stream.write_all(&bytes).await.unwrap();
    within(SOON, welcome(&mut stream, session)).await.unwrap();
    // And one that comes in place of HTTP/2, even in pieces.
    let session = Uuid::new_v4();
    for byte in (Hello { session }).encode() {
        stream.write_all(&[byte]).await.unwrap();
        tokio::task::yield_now().await;
    }
    within(SOON, welcome(&mut stream, session)).await.unwrap();
    client(stream).await.info(v1::InfoRequest {}).await.unwrap();
}

/// A new host on a stream whose old host vanished without the guest's noticing.
#[tokio::test]
async fn a_hello_in_the_middle_of_an_old_session_starts_a_new_one() {
    for split in [PREAMBLE_LEN, 1, 8, 9, 31] {
        let guest = Guest::new();
        let mut stream = guest.stream();
        hello(&mut stream).await.unwrap();
        // The old host: preface and SETTINGS, as far as a session gets before it breaks.
        stream.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0").await.unwrap();
        tokio::time::sleep(Duration::from_millis(30)).await;
        let session = Uuid::new_v4();
        let bytes = Hello { session }.encode();
        stream.write_all(&bytes[..split]).await.unwrap();
        tokio::time::sleep(Duration::from_millis(30)).await;
        stream.write_all(&bytes[split..]).await.unwrap();
        // What the old session still sent comes first: SETTINGS, acknowledgement, GOAWAY.
        let mut seen = Vec::new();
        let wanted = coppice_guest_proto::session::Welcome { session }.encode();
        let look = async {
            while !seen.ends_with(&wanted) {
                seen.push(stream.read_u8().await.unwrap());
            }
        };
        within(SOON, look).await;
        client(stream).await.info(v1::InfoRequest {}).await.unwrap();
    }
}

#[tokio::test]
async fn another_version_closes_the_stream() {
    let guest = Guest::new();
    let mut stream = guest.stream();
    let mut bytes = Hello { session: Uuid::new_v4() }.encode();
    bytes[8] = 2;
    stream.write_all(&bytes).await.unwrap();
    let mut rest = Vec::new();
    within(SOON, stream.read_to_end(&mut rest)).await.unwrap();
    assert!(rest.is_empty());
}

#[tokio::test]
async fn endless_garbage_closes_the_stream() {
    let guest = Guest::new();
    let mut stream = guest.stream();
    let flood = async { while stream.write_all(&[0x55; 65_536]).await.is_ok() {} };
    within(SOON, flood).await;
}

#[tokio::test]
async fn a_session_on_one_stream_ends_the_one_on_the_other() {
    let guest = Guest::new();
    let mut first = guest.resumed().await;
    first.info(v1::InfoRequest {}).await.unwrap();
    let mut second = guest.session().await;
    assert!(within(SOON, first.info(v1::InfoRequest {})).await.is_err());
    // The handshake is the machine's, not the session's.
    assert_eq!(run(&mut second, sh("echo ok")).await.unwrap().text(), "ok");
}

#[tokio::test]
async fn a_slow_call_blocks_no_other() {
    let guest = Guest::new();
    let client = guest.resumed().await;
    let slow: Vec<_> = (0..50)
        .map(|_| {
            let mut client = client.clone();
            tokio::spawn(async move { run(&mut client, sh("sleep 5")).await })
        })
        .collect();
    tokio::time::sleep(Duration::from_millis(200)).await;
    let mut quick = client.clone();
    let outcome = within(Duration::from_secs(4), run(&mut quick, sh("echo quick"))).await.unwrap();
    assert_eq!(outcome.text(), "quick");
    slow.into_iter().for_each(|task| task.abort());
}
