//! Which paths a link opens: prefixes, by whole segments, that no spelling of a path gets around.

use std::borrow::Cow;

use percent_encoding::percent_decode_str;

use crate::error::ApiError;

/// Most prefixes of one link.
const MAX_PREFIXES: usize = 32;
/// Longest prefix, bytes.
const MAX_PREFIX: usize = 1024;
/// How often a path is decoded. What still changes after so many times is refused.
const MAX_DECODINGS: usize = 4;

/// Prefixes that a link may be made with.
pub(crate) fn prefixes(given: Vec<String>) -> Result<Vec<String>, ApiError> {
    let invalid = |message: String| Err(ApiError::invalid("invalid_paths", message));
    if given.len() > MAX_PREFIXES {
        return invalid(format!("paths must be at most {MAX_PREFIXES}, and are {}", given.len()));
    }
    for (at, prefix) in given.iter().enumerate() {
        let plain = prefix.len() <= MAX_PREFIX
            && prefix.bytes().all(|b| b.is_ascii_graphic() && !matches!(b, b'%' | b'?' | b'#' | b'\\' | b';'));
        if !plain || segments(prefix).is_none() {
            return invalid(format!(
                "`paths[{at}]` must begin with `/`, be plain ASCII without `%`, `;`, `?`, `#` and `\\`, and contain no \
                 `//`, `/./` or `/../`"
            ));
        }
    }
    Ok(given)
}

/// Whether the path of a request, as it came, is one that these prefixes open. None of them opens all.
///
/// The path is forwarded as it came, and whoever gets it may decode it, once or twice: each spelling that may come of
/// that must be below a prefix, and be one that means the same to everybody.
pub(crate) fn opens(prefixes: &[String], path: &str) -> bool {
    if prefixes.is_empty() {
        return true;
    }
    let mut path = Cow::Borrowed(path);
    for _ in 0..MAX_DECODINGS {
        if !prefixes.iter().any(|prefix| is_below(prefix, &path)) {
            return false;
        }
        let Ok(decoded) = percent_decode_str(&path).decode_utf8() else { return false };
        if decoded == path {
            return true;
        }
        path = Cow::Owned(decoded.into_owned());
    }
    false
}

fn is_below(prefix: &str, path: &str) -> bool {
    let (Some(prefix), Some(path)) = (segments(prefix), segments(path)) else { return false };
    // A prefix that ends with a slash opens what is in the directory; its last segment is empty.
    let (last, parents) = prefix.split_last().map_or(("", &[][..]), |(last, parents)| (*last, parents));
    if last.is_empty() { path.len() > parents.len() && path.starts_with(parents) } else { path.starts_with(&prefix) }
}

/// Segments of a path that begins with a slash, the last of which may be empty. None when some reader might take it for
/// another path.
fn segments(path: &str) -> Option<Vec<&str>> {
    let rest = path.strip_prefix('/')?;
    if rest.contains(['\\', '\0']) {
        return None;
    }
    let segments: Vec<&str> = rest.split('/').collect();
    let (_, inner) = segments.split_last()?;
    // Some servers cut a parameter off a segment before they look at it.
    let dots = |segment: &&str| matches!(segment.split(';').next(), Some("." | ".."));
    let ambiguous = inner.iter().any(|segment| segment.is_empty()) || segments.iter().any(dots);
    (!ambiguous).then_some(segments)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn list(prefixes: &[&str]) -> Vec<String> {
        prefixes.iter().map(ToString::to_string).collect()
    }

    #[test]
    fn prefixes_open_whole_segments() {
        let both = list(&["/api", "/static/"]);
        for good in
            ["/api", "/api/", "/api/x/y", "/static/", "/static/app.js", "/api/a%20b", "/api/100%25", "/api/%C3%A9"]
        {
            assert!(opens(&both, good), "{good}");
        }
        for bad in ["/", "/apix", "/API", "/static", "/other", "api", "", "/x/api"] {
            assert!(!opens(&both, bad), "{bad}");
        }
        assert!(opens(&[], "/anything/../at//all"));
        assert!(opens(&list(&["/"]), "/a/b") && opens(&list(&["/"]), "/"));
    }

    #[test]
    fn no_spelling_gets_around() {
        let api = list(&["/api"]);
        for bad in [
            "/api/../admin",
            "/api/%2e%2e/admin",
            "/api/.%2E/admin",
            "/api/%252e%252e/admin",
            "/api/..%2fadmin",
            "/api%2f..%2fadmin",
            "/api%2fadmin",
            "/api/..;/admin",
            "/api/..;x=1/admin",
            "/api/..%3b/admin",
            "/api//admin",
            "//api/x",
            "/%2fapi/x",
            "/api/..\\admin",
            "/api/%5c..%5cadmin",
            "/api/./x",
            "/./api",
            "/api/..",
            "/api/%00",
            "/api/%ff",
            "/%61pi",
        ] {
            assert!(!opens(&api, bad), "{bad}");
        }
    }

    #[test]
    fn prefixes_are_plain() {
        assert!(prefixes(list(&["/", "/a", "/a/", "/a.b/c"])).is_ok());
        for bad in ["", "a", "//", "/a//b", "/a/../b", "/..", "/.", "/a%20b", "/a?b", "/a b", "/é", "/a;b", "/a\\b"] {
            assert!(prefixes(list(&[bad])).is_err(), "{bad}");
        }
        assert!(prefixes(vec!["/a".into(); 33]).is_err());
    }

    /// As a careless server reads a path: everything decoded twice, then dots and empty segments resolved.
    fn careless(path: &str) -> Vec<String> {
        let once = percent_decode_str(path).decode_utf8_lossy().into_owned();
        let twice = percent_decode_str(&once).decode_utf8_lossy().replace('\\', "/");
        let mut resolved = Vec::new();
        for segment in twice.split('/') {
            match segment.split(';').next().unwrap_or_default() {
                "" | "." => {}
                ".." => drop(resolved.pop()),
                other => resolved.push(other.to_owned()),
            }
        }
        resolved
    }

    proptest! {
        #[test]
        fn what_is_opened_is_below_the_prefix_for_careless_readers_too(
            parts in prop::collection::vec("api|\\.|\\.\\.|%2e|%252e|%2f|%5c|/|//|;|x|%25|%", 0..12)
        ) {
            let path = format!("/{}", parts.concat());
            if opens(&list(&["/api"]), &path) {
                let read = careless(&path);
                prop_assert_eq!(read.first().map(String::as_str), Some("api"), "{}", path);
            }
        }
    }
}
