//! The check that every name passes before it becomes part of a path.
//!
//! It says nothing about whether a name exists or may be used by a caller.

/// Longest accepted name, in bytes.
pub const MAX_NAME: usize = 128;

/// The name cannot be used in a path.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error(
    "{name:?} is not a usable name: 1 to {MAX_NAME} letters, digits, '-', '_' and '.', beginning with a letter or digit, \
     without '..'"
)]
pub struct NameError {
    /// The beginning of the name as it was given.
    pub name: String,
}

/// Accepts names that are one plain path component: ASCII letters, digits, `-`, `_`, `.`, beginning with a letter or
/// digit, without `..`.
///
/// # Errors
/// [`NameError`] for everything else.
pub fn check_name(name: &str) -> Result<&str, NameError> {
    let first = name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    let rest = name.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'));
    if first && rest && name.len() <= MAX_NAME && !name.contains("..") {
        Ok(name)
    } else {
        Err(NameError { name: name.chars().take(MAX_NAME).collect() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn usual_names_pass() {
        for name in ["base", "code-interpreter", "ubuntu-24.04", "6f1c3f6e-3f4f-4c3a-9a53-0e6b6a5f7a10", "a", "v_1"] {
            assert_eq!(check_name(name), Ok(name));
        }
    }

    #[test]
    fn everything_that_could_leave_the_directory_is_refused() {
        for name in ["", ".", "..", "a/b", "/a", "a..b", ".hidden", "-rf", "a\0b", "a b", "ä", &"x".repeat(129)] {
            assert!(check_name(name).is_err(), "{name:?}");
        }
    }

    proptest! {
        #[test]
        fn an_accepted_name_is_one_normal_component(name in ".{0,140}") {
            if check_name(&name).is_ok() {
                let path = std::path::Path::new(&name);
                let parts: Vec<_> = path.components().collect();
                prop_assert_eq!(parts.len(), 1);
                prop_assert!(matches!(parts[0], std::path::Component::Normal(_)));
            }
        }
    }
}
