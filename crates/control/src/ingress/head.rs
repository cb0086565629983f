//! What of a request's and a response's head goes through, and what is put in its place.
//!
//! A request loses whatever is about its connection to us or names a token of ours, and what it says of where it came
//! from is ours to say. A response that is served on the API's own host loses what would act on that host beyond the
//! sandbox's own pages.

use std::net::SocketAddr;

use http::header::{
    ACCEPT_ENCODING, ACCESS_CONTROL_ALLOW_ORIGIN, ALT_SVC, AUTHORIZATION, CONNECTION, CONTENT_LENGTH,
    CONTENT_SECURITY_POLICY, COOKIE, EXPECT, FORWARDED, HOST, LOCATION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION,
    SET_COOKIE, STRICT_TRANSPORT_SECURITY, TE, TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use http::{HeaderMap, HeaderName, HeaderValue};

use crate::tokens::is_well_formed;

/// Carries a secret for the service in the sandbox past [`AUTHORIZATION`], which is ours.
const BROKER_AUTH: HeaderName = HeaderName::from_static("x-pandastack-broker-auth");
/// Tells the service which sandbox it is in.
const SANDBOX: HeaderName = HeaderName::from_static("x-fcs-sandbox");
/// Cookies whose names begin so are this server's.
pub(crate) const OUR_COOKIES: &str = "coppice_";

/// About one connection, not about what is asked over it (RFC 9110, 7.6.1), and what asks for another protocol.
const HOP_BY_HOP: [HeaderName; 10] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    HeaderName::from_static("http2-settings"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// What acts on a whole host, which is not the sandbox's alone.
const WHOLE_HOST: [HeaderName; 8] = [
    ALT_SVC,
    STRICT_TRANSPORT_SECURITY,
    HeaderName::from_static("clear-site-data"),
    HeaderName::from_static("service-worker-allowed"),
    HeaderName::from_static("public-key-pins"),
    HeaderName::from_static("nel"),
    HeaderName::from_static("report-to"),
    HeaderName::from_static("reporting-endpoints"),
];

/// A page of a stranger's on the API's host is given an origin of its own, so that its scripts are nobody there.
const OWN_ORIGIN: HeaderValue =
    HeaderValue::from_static("sandbox allow-scripts allow-forms allow-popups allow-modals allow-downloads");

/// Whose a request's `Authorization` is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Authorization {
    /// Ours; the service's comes in another header.
    Ours,
    /// The service's, unless it is a token of ours.
    Services,
}

/// Where a request is served.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Place {
    /// On the API's host, below this path.
    Below(String),
    /// On a host of the port's own.
    OwnHost,
}

/// What a request's head is made with.
#[derive(Debug)]
pub(crate) struct Sender<'a> {
    pub(crate) sandbox: &'a str,
    pub(crate) port: u16,
    pub(crate) peer: Option<SocketAddr>,
    pub(crate) scheme: &'static str,
    pub(crate) authority: Option<&'a str>,
    pub(crate) place: &'a Place,
    pub(crate) authorization: Authorization,
    /// The protocol that the connection is to go on with.
    pub(crate) upgrade: Option<HeaderValue>,
}

/// The protocol that a request asks to go on with, if we let it through: HTTP/2 would carry requests past all checks.
pub(crate) fn upgrade(headers: &HeaderMap) -> Option<HeaderValue> {
    let asked = tokens(headers, &CONNECTION).any(|token| token.eq_ignore_ascii_case("upgrade"));
    let protocol = headers.get(UPGRADE).filter(|_| asked)?;
    let text = protocol.to_str().ok()?.trim().to_ascii_lowercase();
    let http = text.split(',').any(|one| matches!(one.trim(), "h2" | "h2c") || one.trim().starts_with("http/"));
    (!http && !text.is_empty()).then(|| protocol.clone())
}

/// The headers that a request goes on with.
pub(crate) fn request(mut headers: HeaderMap, sender: &Sender<'_>) -> HeaderMap {
    strip(&mut headers);
    headers.remove(CONTENT_LENGTH);
    headers.remove(EXPECT);
    let forwarded: Vec<HeaderName> =
        headers.keys().filter(|name| name.as_str().starts_with("x-forwarded-")).cloned().collect();
    for name in forwarded.iter().chain(&[FORWARDED, HeaderName::from_static("x-real-ip"), SANDBOX]) {
        headers.remove(name);
    }
    let brokered = headers.remove(BROKER_AUTH);
    if sender.authorization == Authorization::Ours || is_our_token(&headers) {
        headers.remove(AUTHORIZATION);
    }
    if let Some(brokered) = brokered {
        headers.insert(AUTHORIZATION, brokered);
    }
    cookies(&mut headers);
    let mut set = |name: &'static str, value: Option<String>| {
        if let Some(value) = value.and_then(|value| HeaderValue::try_from(value).ok()) {
            headers.insert(name, value);
        }
    };
    set("x-forwarded-proto", Some(sender.scheme.to_owned()));
    set("x-forwarded-host", sender.authority.map(str::to_owned));
    set("x-forwarded-for", sender.peer.map(|peer| peer.ip().to_canonical().to_string()));
    set(SANDBOX_NAME, Some(sender.sandbox.to_owned()));
    // Services check the host that they are asked for: on the API's host, what they call themselves is all they know.
    let host = match sender.place {
        Place::OwnHost => sender.authority.map(str::to_owned),
        Place::Below(prefix) => {
            set("x-forwarded-prefix", Some(prefix.clone()));
            None
        }
    };
    set("host", Some(host.unwrap_or_else(|| format!("localhost:{}", sender.port))));
    if let Some(protocol) = &sender.upgrade {
        headers.insert(CONNECTION, HeaderValue::from_static("upgrade"));
        headers.insert(UPGRADE, protocol.clone());
    }
    headers
}

const SANDBOX_NAME: &str = "x-fcs-sandbox";

/// The headers that a response goes on with. `sized`: its length is only known from them, as of an answer to HEAD.
pub(crate) fn response(mut headers: HeaderMap, place: &Place, port: u16, sized: bool) -> HeaderMap {
    let chunked = headers.contains_key(TRANSFER_ENCODING);
    strip(&mut headers);
    if chunked || !sized {
        headers.remove(CONTENT_LENGTH);
    }
    let Place::Below(prefix) = place else { return headers };
    for name in WHOLE_HOST {
        headers.remove(name);
    }
    scope_cookies(&mut headers, prefix);
    if let Some(location) = headers.get(LOCATION).and_then(|value| below(value, prefix, port)) {
        headers.insert(LOCATION, location);
    }
    // Browsers hold to every policy of several.
    headers.append(CONTENT_SECURITY_POLICY, OWN_ORIGIN);
    // A page with an origin of its own may still load its own files: who has the link may read them anyway.
    headers.entry(ACCESS_CONTROL_ALLOW_ORIGIN).or_insert(HeaderValue::from_static("*"));
    headers
}

fn strip(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> =
        tokens(headers, &CONNECTION).filter_map(|token| HeaderName::try_from(token).ok()).collect();
    for name in named {
        // Naming these would be a way to get rid of them.
        if ![HOST, AUTHORIZATION, COOKIE, CONTENT_LENGTH, BROKER_AUTH, ACCEPT_ENCODING, SET_COOKIE].contains(&name) {
            headers.remove(name);
        }
    }
    for name in HOP_BY_HOP {
        headers.remove(name);
    }
}

fn tokens<'a>(headers: &'a HeaderMap, name: &HeaderName) -> impl Iterator<Item = &'a str> {
    let values = headers.get_all(name).into_iter().filter_map(|value| value.to_str().ok());
    values.flat_map(|value| value.split(',')).map(str::trim).filter(|token| !token.is_empty())
}

/// A token of ours: a guest would be its thief. However the header is spelled, if one of its words is a token it goes.
fn is_our_token(headers: &HeaderMap) -> bool {
    headers.get_all(AUTHORIZATION).iter().any(|value| {
        let text = String::from_utf8_lossy(value.as_bytes());
        text.split_ascii_whitespace().any(is_well_formed)
    })
}

/// Leaves out cookies of ours.
fn cookies(headers: &mut HeaderMap) {
    let ours = |pair: &[u8]| pair.trim_ascii_start().starts_with(OUR_COOKIES.as_bytes());
    let kept: Vec<HeaderValue> = headers
        .get_all(COOKIE)
        .iter()
        .filter_map(|value| {
            let pairs: Vec<&[u8]> = value.as_bytes().split(|byte| *byte == b';').filter(|pair| !ours(pair)).collect();
            HeaderValue::from_bytes(pairs.join(&b';').trim_ascii()).ok().filter(|value| !value.is_empty())
        })
        .collect();
    headers.remove(COOKIE);
    for value in kept {
        headers.append(COOKIE, value);
    }
}

/// Cookies that a service sets come back to it and to nothing else on this host.
fn scope_cookies(headers: &mut HeaderMap, prefix: &str) {
    let scoped: Vec<HeaderValue> = headers
        .get_all(SET_COOKIE)
        .iter()
        .filter_map(|value| {
            let text = value.to_str().ok()?;
            let mut parts = text.split(';');
            let pair = parts.next()?.trim();
            if pair.starts_with(OUR_COOKIES) || pair.starts_with("__Host-") {
                return None;
            }
            let mut path = "/";
            let mut out = pair.to_owned();
            for part in parts {
                let (name, value) = part.split_once('=').unwrap_or((part, ""));
                match name.trim().to_ascii_lowercase().as_str() {
                    "path" => path = value.trim(),
                    "domain" => {}
                    _ => out.extend([";", part]),
                }
            }
            let path = if path.starts_with(prefix) { path.to_owned() } else { format!("{prefix}{path}") };
            let path = if path.starts_with('/') { path } else { format!("{prefix}/") };
            HeaderValue::try_from(format!("{out}; Path={path}")).ok()
        })
        .collect();
    headers.remove(SET_COOKIE);
    for value in scoped {
        headers.append(SET_COOKIE, value);
    }
}

/// A place on the service's host, as a place below the prefix; `None`: it needs no change.
fn below(location: &HeaderValue, prefix: &str, port: u16) -> Option<HeaderValue> {
    let text = location.to_str().ok()?;
    let own = format!("localhost:{port}");
    let path = ["http://", "https://", "//"]
        .iter()
        .find_map(|start| text.strip_prefix(start)?.strip_prefix(&own))
        .filter(|rest| rest.is_empty() || rest.starts_with('/'))
        .or_else(|| Some(text).filter(|text| text.starts_with('/') && !text.starts_with("//")))?;
    let inside = path.strip_prefix(prefix).is_some_and(|rest| rest.is_empty() || rest.starts_with(['/', '?', '#']));
    if inside { None } else { HeaderValue::try_from(format!("{prefix}{path}")).ok() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn headers(pairs: &[(&'static str, &str)]) -> HeaderMap {
        let mut headers = HeaderMap::new();
        for (name, value) in pairs {
            headers.append(*name, HeaderValue::from_str(value).unwrap());
        }
        headers
    }

    fn sent(place: &Place, authorization: Authorization, pairs: &[(&'static str, &str)]) -> HeaderMap {
        let sender = Sender {
            sandbox: "id",
            port: 3000,
            peer: Some("[::ffff:192.0.2.1]:5".parse().unwrap()),
            scheme: "https",
            authority: Some("api.example"),
            place,
            authorization,
            upgrade: None,
        };
        request(headers(pairs), &sender)
    }

    #[test]
    fn what_is_about_a_connection_stays_with_it() {
        let below = Place::Below("/p".into());
        let out = sent(
            &below,
            Authorization::Ours,
            &[
                ("connection", "close, X-Secret, authorization"),
                ("x-secret", "1"),
                ("keep-alive", "5"),
                ("te", "trailers"),
                ("upgrade", "h2c"),
                ("http2-settings", "x"),
                ("transfer-encoding", "chunked"),
                ("content-length", "5"),
                ("expect", "100-continue"),
                ("x-forwarded-for", "1.1.1.1"),
                ("x-forwarded-for", "2.2.2.2"),
                ("x-forwarded-port", "1"),
                ("x-forwarded-client-cert", "x"),
                ("forwarded", "for=1.1.1.1"),
                ("x-real-ip", "1.1.1.1"),
                ("x-fcs-sandbox", "other"),
                ("authorization", "Bearer mine"),
                ("x-pandastack-broker-auth", "Basic theirs"),
                ("cookie", "a=b; coppice_preview=x; c=d"),
                ("cookie", "coppice_preview=y"),
                ("accept", "*/*"),
            ],
        );
        let expected = headers(&[
            ("accept", "*/*"),
            ("cookie", "a=b; c=d"),
            ("authorization", "Basic theirs"),
            ("x-forwarded-proto", "https"),
            ("x-forwarded-host", "api.example"),
            ("x-forwarded-for", "192.0.2.1"),
            ("x-forwarded-prefix", "/p"),
            ("x-fcs-sandbox", "id"),
            ("host", "localhost:3000"),
        ]);
        assert_eq!(out, expected);
    }

    #[test]
    fn a_token_of_ours_never_reaches_a_guest() {
        let token = format!("pds_{}", "0".repeat(32));
        for (value, passes) in [
            ("Basic abc".to_owned(), true),
            ("Bearer other".to_owned(), true),
            (format!("Bearer {token}"), false),
            (format!("bearer  {token}"), false),
            (token.clone(), false),
            (format!("Token {token}"), false),
        ] {
            let out = sent(&Place::OwnHost, Authorization::Services, &[("authorization", &value)]);
            assert_eq!(out.contains_key("authorization"), passes, "{value}");
            assert_eq!(out.get("host").unwrap(), "api.example");
            assert!(
                !sent(&Place::OwnHost, Authorization::Ours, &[("authorization", &value)]).contains_key("authorization")
            );
        }
    }

    #[test]
    fn upgrades_to_anything_but_http() {
        let asked =
            |connection: &str, protocol: &str| upgrade(&headers(&[("connection", connection), ("upgrade", protocol)]));
        assert!(asked("keep-alive, Upgrade", "websocket").is_some());
        assert!(asked("upgrade", "tcp").is_some());
        for (connection, protocol) in [
            ("close", "websocket"),
            ("upgrade", "h2c"),
            ("upgrade", "websocket, H2C"),
            ("upgrade", "HTTP/2.0"),
            ("upgrade", ""),
        ] {
            assert!(asked(connection, protocol).is_none(), "{connection} {protocol}");
        }
    }

    #[test]
    fn a_response_on_the_apis_host_acts_on_its_own_pages_only() {
        let out = response(
            headers(&[
                ("connection", "x-hop"),
                ("x-hop", "1"),
                ("content-length", "7"),
                ("strict-transport-security", "max-age=1"),
                ("clear-site-data", "*"),
                ("content-security-policy", "default-src 'self'"),
                ("set-cookie", "a=b; Path=/x; Domain=example; HttpOnly"),
                ("set-cookie", "coppice_preview=stolen"),
                ("set-cookie", "c=d"),
                ("location", "/login?x"),
            ]),
            &Place::Below("/v1/p/t".into()),
            3000,
            false,
        );
        let cookies: Vec<_> = out.get_all("set-cookie").iter().collect();
        assert_eq!(cookies, ["a=b; HttpOnly; Path=/v1/p/t/x", "c=d; Path=/v1/p/t/"]);
        assert_eq!(out.get("location").unwrap(), "/v1/p/t/login?x");
        assert_eq!(out.get_all("content-security-policy").iter().count(), 2);
        for gone in ["connection", "x-hop", "content-length", "strict-transport-security", "clear-site-data"] {
            assert!(!out.contains_key(gone), "{gone}");
        }
        let own =
            response(headers(&[("strict-transport-security", "x"), ("content-length", "7")]), &Place::OwnHost, 1, true);
        assert_eq!(own.len(), 2);
        let both = headers(&[("content-length", "7"), ("transfer-encoding", "chunked")]);
        assert!(response(both, &Place::OwnHost, 1, true).is_empty());
    }

    #[test]
    fn places_stay_below_the_prefix() {
        let moved = |text: &str| below(&HeaderValue::from_str(text).unwrap(), "/p/x", 80);
        for (from, to) in [
            ("/", Some("/p/x/")),
            ("/p/xy", Some("/p/x/p/xy")),
            ("/p/x/a", None),
            ("/p/x", None),
            ("http://localhost:80/a", Some("/p/x/a")),
            ("http://localhost:80", Some("/p/x")),
            ("http://localhost:8080/a", None),
            ("https://example.org/a", None),
            ("//example.org/a", None),
            ("a/b", None),
        ] {
            assert_eq!(moved(from).as_ref().map(|value| value.to_str().unwrap()), to, "{from}");
        }
    }

    proptest! {
        #[test]
        fn nothing_panics(
            names in prop::collection::vec("[a-z-]{1,12}|connection|cookie|set-cookie|location|authorization|upgrade", 0..8),
            values in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..40), 8),
        ) {
            let mut map = HeaderMap::new();
            for (name, value) in names.iter().zip(&values) {
                if let (Ok(name), Ok(value)) = (HeaderName::try_from(name), HeaderValue::from_bytes(value)) {
                    map.append(name, value);
                }
            }
            let place = Place::Below("/p".into());
            let _protocol = upgrade(&map);
            let sender = Sender {
                sandbox: "id", port: 1, peer: None, scheme: "http", authority: None, place: &place,
                authorization: Authorization::Services, upgrade: None,
            };
            let _request = request(map.clone(), &sender);
            let _response = response(map, &place, 1, false);
        }
    }
}
