//! The client against a fake server.

#[cfg(test)]
mod capacity;
#[cfg(test)]
mod explore;
#[cfg(test)]
mod fake;
#[cfg(test)]
mod wire;
