//! `coppice port-forward`: ports of this machine that lead to ports of a sandbox, until it is interrupted.

use std::net::{Ipv4Addr, SocketAddr};
use std::str::FromStr;
use std::time::Duration;

use clap::Args;
use coppice_client::{Client, ClientError};
use serde::Serialize;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::commands::Context;
use crate::error::CliError;
use crate::interrupt::interrupted;
use crate::output::Output;
use crate::resolve;

/// Arguments of `coppice port-forward`.
///
/// It listens on 127.0.0.1 and goes on until it is interrupted (Ctrl-C) or the sandbox is gone.
#[derive(Debug, Args)]
pub struct PortForwardArgs {
    /// Its id, or a unique beginning of it
    sandbox: String,
    /// Ports of the sandbox, each with the port of this machine if that is another one; 0: any free one
    #[arg(required = true, value_name = "[LOCAL:]REMOTE", value_parser = Forward::from_str)]
    ports: Vec<Forward>,
}

/// One port that leads to another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Forward {
    local: u16,
    remote: u16,
}

impl FromStr for Forward {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (local, remote) = text.split_once(':').unwrap_or((text, text));
        let port = |text: &str| text.parse::<u16>().map_err(|_| format!("{text:?} is no port"));
        match (port(local)?, port(remote)?) {
            (_, 0) => Err("the sandbox's port must be 1 to 65535".into()),
            (local, remote) => Ok(Self { local, remote }),
        }
    }
}

/// What is printed of one.
#[derive(Debug, Serialize)]
struct Open {
    local: SocketAddr,
    port: u16,
}

#[derive(Debug, Serialize)]
struct Opened {
    sandbox: String,
    forwards: Vec<Open>,
}

pub(crate) async fn run(context: &Context<'_>, args: PortForwardArgs) -> Result<(), CliError> {
    let client = context.client()?;
    tokio::select! {
        done = forward(context, &client, args) => done,
        () = interrupted() => {
            context.output.note("stopped");
            Ok(())
        }
    }
}

async fn forward(context: &Context<'_>, client: &Client, args: PortForwardArgs) -> Result<(), CliError> {
    let id = resolve::sandbox(client, &args.sandbox).await?;
    // A mistyped id is told now, not to the first connection.
    client.get(&id).await?;
    let (mut listeners, mut forwards) = (Vec::new(), Vec::new());
    for forward in &args.ports {
        let (listener, local) = listen(forward.local).await?;
        listeners.push((listener, forward.remote));
        forwards.push(Open { local, port: forward.remote });
    }
    let opened = Opened { sandbox: id.clone(), forwards };
    context.output.result(&opened, |_| {
        opened.forwards.iter().map(|open| format!("{} -> {} of {id}\n", open.local, open.port)).collect()
    })?;
    context.output.note("Ctrl-C ends it");
    let mut tasks = JoinSet::new();
    for (listener, port) in listeners {
        tasks.spawn(serve(*context.output, client.clone(), id.clone(), listener, port));
    }
    match tasks.join_next().await {
        Some(Ok(error)) => Err(error.into()),
        Some(Err(error)) => Err(CliError::failed("port_forward", "forwarding failed").because(error)),
        None => Ok(()),
    }
}

async fn listen(port: u16) -> Result<(TcpListener, SocketAddr), CliError> {
    let failed = |error: std::io::Error| {
        CliError::failed("listen", format!("can't listen on 127.0.0.1:{port}"))
            .hint("choose another port of this machine, as in 8080:80; 0:80 takes any free one")
            .because(error)
    };
    let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, port)).await.map_err(failed)?;
    let address = listener.local_addr().map_err(failed)?;
    Ok((listener, address))
}

/// Accepts until the sandbox is gone. Dropping it ends its connections.
async fn serve(output: Output, client: Client, id: String, listener: TcpListener, port: u16) -> ClientError {
    let mut connections = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, _)) => {
                    connections.spawn(connection(client.clone(), id.clone(), stream, port));
                }
                // Out of descriptors, mostly: the connection stays in the queue, so don't spin.
                Err(error) => {
                    output.note(&format!("can't accept a connection: {error}"));
                    tokio::time::sleep(Duration::from_millis(200)).await;
                }
            },
            Some(done) = connections.join_next() => match done {
                Ok(Err(error)) if error.is_not_found() => return error,
                Ok(Err(error)) => output.note(&format!("port {port}: {error}")),
                _ => {}
            },
        }
    }
}

async fn connection(client: Client, id: String, mut local: TcpStream, port: u16) -> Result<(), ClientError> {
    let mut tunnel = client.tunnel(&id, port).await?;
    drop(local.set_nodelay(true));
    // However it ends, both sides have been told.
    if let Err(error) = tokio::io::copy_bidirectional(&mut local, &mut tunnel).await {
        tracing::debug!(port, %error, "a connection broke");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ports_are_one_or_two() {
        assert_eq!("80".parse(), Ok(Forward { local: 80, remote: 80 }));
        assert_eq!("8080:80".parse(), Ok(Forward { local: 8080, remote: 80 }));
        assert_eq!("0:80".parse(), Ok(Forward { local: 0, remote: 80 }));
        for bad in ["", "0", "80:0", "x", "80:", ":80", "1:2:3", "65536", "-1"] {
            assert!(bad.parse::<Forward>().is_err(), "{bad}");
        }
    }
}
