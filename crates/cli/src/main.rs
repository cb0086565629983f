//! The `coppice` binary; everything is in the library.
#![forbid(unsafe_code)]

fn main() -> std::process::ExitCode {
    coppice_cli::main()
}
