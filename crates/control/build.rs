//! Makes cargo embed the migrations again when one is added.

fn main() {
    println!("cargo:rerun-if-changed=migrations");
}
