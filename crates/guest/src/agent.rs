//! Runs the agent: a service, and one task per port that serves session after session on it.
//!
//! The task of a port never ends: whatever happens to a session, the next host must find it waiting.

use std::{io, path::Path, sync::Arc};

use coppice_guest_proto::session::PORTS;
use tokio::net::UnixListener;

use crate::{
    boot, mounts, port,
    port::PortStream,
    reaper::ReapMode,
    service::{GuestService, ServiceConfig},
    session::serve,
    system::{LinuxSystem, System},
};

/// Serves both virtio-serial ports, for ever. For PID 1.
pub async fn run_ports() -> io::Result<()> {
    let system = Arc::new(LinuxSystem::new().with_groups(Path::new(mounts::CGROUPS)));
    match system.bring_network_up() {
        Ok(true) => {}
        Ok(false) => tracing::info!("there is no network interface"),
        // A handshake with a network will fail, and say so to the host.
        Err(error) => tracing::error!("the network is not up: {error}"),
    }
    let service = GuestService::new(ServiceConfig { system, reap: ReapMode::All })?;
    let mut tasks = Vec::new();
    for name in PORTS {
        let port = open(name).map_err(|e| io::Error::new(e.kind(), format!("port {name}: {e}")))?;
        tasks.push(tokio::spawn(serve_port(name, port, service.clone())));
    }
    tracing::info!("ready");
    for task in tasks {
        task.await?;
    }
    Ok(())
}

fn open(name: &str) -> io::Result<PortStream> {
    let path = boot::retry(|| port::find(name))?;
    boot::wait_for(&path)?;
    PortStream::open(&path)
}

async fn serve_port(name: &'static str, port: PortStream, service: GuestService) {
    let port = Arc::new(tokio::sync::Mutex::new(port));
    loop {
        let (port, service) = (port.clone(), service.clone());
        // In a task of its own, so that a bug which panics costs one session and not the port.
        let session = tokio::spawn(async move {
            let mut port = port.lock().await;
            if let Err(error) = port.has_data().await {
                // An error that came back at once for ever would spin; give the machine room.
                tracing::error!("port {name}: {error}");
                tokio::time::sleep(std::time::Duration::from_secs(1)).await;
                return;
            }
            if let Err(error) = serve(&mut *port, &service).await {
                tracing::warn!("port {name}: {error}");
            }
        });
        if let Err(error) = session.await {
            tracing::error!("port {name}: a session failed: {error}");
        }
    }
}

/// Serves connections to a unix socket, for tests and debugging. Each connection is a stream of sessions.
pub async fn run_unix(path: &Path, system: Arc<dyn System>) -> io::Result<()> {
    let listener = UnixListener::bind(path)?;
    let service = GuestService::new(ServiceConfig { system, reap: ReapMode::Own })?;
    loop {
        let (stream, _) = listener.accept().await?;
        let service = service.clone();
        tokio::spawn(async move {
            if let Err(error) = serve(stream, &service).await {
                tracing::warn!("connection: {error}");
            }
        });
    }
}
