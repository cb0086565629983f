//! The `coppice` binary as a person or a script meets it: what it prints, and how it ends.

#[cfg(test)]
mod commands;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod ports;
#[cfg(test)]
mod tenants;
#[cfg(test)]
mod usage;
