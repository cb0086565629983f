//! Dependencies between our crates point up one list only; a crate that needs one below it is in the wrong place.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]
use std::process::Command;

/// Each crate may use those before it. The order of the design.
const ORDER: [&str; 15] = [
    "coppice-fault",
    "coppice-api",
    "coppice-guest-proto",
    "coppice-snapshot",
    "coppice-guest",
    "coppice-disk",
    "coppice-net",
    "coppice-engine",
    "coppice-broker",
    "coppice-image",
    "coppice-host",
    "coppice-control",
    "coppice-client",
    "coppice-cli",
    "coppice-testkit",
];

/// Crates without `unsafe` say so to the compiler.
const MAY_BE_UNSAFE: [&str; 5] = ["coppice-guest", "coppice-disk", "coppice-net", "coppice-engine", "coppice-broker"];

fn metadata() -> serde_json::Value {
    let root = concat!(env!("CARGO_MANIFEST_DIR"), "/../..");
    let output = Command::new(env!("CARGO"))
        .args(["metadata", "--no-deps", "--format-version", "1", "--offline"])
        .current_dir(root)
        .output()
        .unwrap();
    assert!(output.status.success(), "cargo metadata: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).unwrap()
}

#[test]
fn dependencies_point_up_the_list_only() {
    let metadata = metadata();
    let place = |name: &str| ORDER.iter().position(|n| *n == name);
    let packages = metadata["packages"].as_array().unwrap();
    assert_eq!(packages.len(), ORDER.len(), "a crate is missing from the list, or the list has one that is gone");
    for package in packages {
        let name = package["name"].as_str().unwrap();
        let own = place(name).unwrap_or_else(|| panic!("{name} has no place in the list"));
        for dependency in package["dependencies"].as_array().unwrap() {
            // What only tests use may be anything: testkit drives them all.
            if dependency["kind"].as_str() == Some("dev") {
                continue;
            }
            let used = dependency["name"].as_str().unwrap();
            if let Some(at) = place(used) {
                assert!(at < own, "{name} depends on {used}, which is below it");
            }
        }
    }
}

#[test]
fn crates_that_need_no_unsafe_forbid_it() {
    for package in metadata()["packages"].as_array().unwrap() {
        let name = package["name"].as_str().unwrap();
        if MAY_BE_UNSAFE.contains(&name) {
            continue;
        }
        for target in package["targets"].as_array().unwrap() {
            if target["kind"][0] != "lib" {
                continue;
            }
            let text = std::fs::read_to_string(target["src_path"].as_str().unwrap()).unwrap();
            assert!(text.contains("#![forbid(unsafe_code)]"), "{name} neither needs unsafe nor forbids it");
        }
    }
}
