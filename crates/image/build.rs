//! Rebuilds the crate when a built-in template changes: `include_dir!` cannot tell cargo itself.
fn main() {
    println!("cargo:rerun-if-changed=../../templates");
}
