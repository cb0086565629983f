//! The binary: PID 1 in a sandbox, or (`--serve-unix`) an ordinary process that serves the same protocol.

use std::{
    io,
    path::{Path, PathBuf},
    process::ExitCode,
    sync::Arc,
};

use coppice_guest::{LinuxSystem, RecordingSystem, System, agent, boot, console};

const USAGE: &str = "\
usage: coppice-guest --serve-unix PATH [--root DIR | --control-this-machine]
       coppice-guest --version

The agent of a Coppice sandbox, which runs as PID 1 there. With --serve-unix it serves the guest protocol on a unix
socket; paths are below DIR (default /), and clock, random numbers, host name and file system freezes are only
recorded, unless --control-this-machine is given.";

fn main() -> ExitCode {
    console::install(tracing::Level::INFO);
    if boot::is_pid_1() {
        run_as_pid_1()
    }
    let args: Vec<_> = std::env::args_os().skip(1).collect();
    let args: Vec<_> = args.iter().map(|arg| arg.to_str().unwrap_or_default()).collect();
    let system: Arc<dyn System> = match *args {
        ["--version"] => {
            println!("coppice-guest {}", env!("CARGO_PKG_VERSION"));
            return ExitCode::SUCCESS;
        }
        ["--serve-unix", _] => Arc::new(RecordingSystem::new("/")),
        ["--serve-unix", _, "--root", root] => Arc::new(RecordingSystem::new(root)),
        ["--serve-unix", _, "--control-this-machine"] => Arc::new(LinuxSystem::new()),
        _ => {
            eprintln!("{USAGE}");
            return ExitCode::from(2);
        }
    };
    let path = PathBuf::from(args.get(1).copied().unwrap_or_default());
    match serve_unix(&path, system) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            console::line(&format!("{}: {error}", path.display()));
            ExitCode::FAILURE
        }
    }
}

fn serve_unix(path: &Path, system: Arc<dyn System>) -> io::Result<()> {
    runtime()?.block_on(agent::run_unix(path, system))
}

fn runtime() -> io::Result<tokio::runtime::Runtime> {
    // Two at least: one that is held up for a moment must not hold up the other port.
    let threads = std::thread::available_parallelism().map_or(2, usize::from).clamp(2, 4);
    tokio::runtime::Builder::new_multi_thread().worker_threads(threads).enable_all().build()
}

fn run_as_pid_1() -> ! {
    std::panic::set_hook(Box::new(|panic| console::line(&format!("panic: {panic}"))));
    let outcome = std::panic::catch_unwind(|| {
        boot::boot()?;
        runtime()?.block_on(agent::run_ports())
    });
    boot::power_off(&match outcome {
        Ok(Ok(())) => "the agent has ended".to_owned(),
        Ok(Err(error)) => error.to_string(),
        Err(_) => "the agent panicked".to_owned(),
    })
}
