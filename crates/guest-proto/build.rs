//! Generates the message and service types from `proto/guest.proto`. protox is a protobuf compiler in Rust, so that no
//! `protoc` has to be installed.

fn main() -> Result<(), Box<dyn std::error::Error>> {
    println!("cargo:rerun-if-changed=proto/guest.proto");
    let descriptors = protox::compile(["proto/guest.proto"], ["proto"])?;
    tonic_prost_build::configure().compile_fds(descriptors)?;
    Ok(())
}
