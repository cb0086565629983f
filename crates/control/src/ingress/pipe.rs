//! Bytes both ways, once a connection has left HTTP behind. An end of one way leaves the other open.

use std::future::Future;

use hyper::upgrade::{OnUpgrade, Upgraded};
use hyper_util::rt::TokioIo;
use tokio::io::{AsyncRead, AsyncWrite};

use crate::Control;

/// Connects a client whose connection is being upgraded with the other side, in a task of its own, until both ways have
/// ended, one breaks, or the server stops.
pub(crate) fn connect<S>(
    control: &Control,
    client: OnUpgrade,
    other: impl Future<Output = Result<S, hyper::Error>> + Send + 'static,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let stop = control.stop().soon.clone();
    let work = async move {
        let (client, mut other) = tokio::try_join!(client, other)?;
        let mut client = TokioIo::new(client);
        Ok::<_, hyper::Error>(tokio::io::copy_bidirectional(&mut client, &mut other).await)
    };
    drop(tokio::spawn(async move {
        metrics::gauge!("coppice_tunnels").increment(1);
        tokio::select! {
            done = work => match done {
                Ok(Ok((up, down))) => tracing::debug!(up, down, "an upgraded connection ended"),
                Ok(Err(error)) => tracing::debug!(%error, "an upgraded connection broke"),
                Err(error) => tracing::debug!(%error, "a connection was not upgraded"),
            },
            () = stop.cancelled() => {}
        }
        metrics::gauge!("coppice_tunnels").decrement(1);
    }));
}

/// The bytes of an upgraded connection.
pub(crate) async fn bytes(upgrade: OnUpgrade) -> Result<TokioIo<Upgraded>, hyper::Error> {
    upgrade.await.map(TokioIo::new)
}
