//! Preview hosts: `{port}-{sandbox}.SUFFIX` is a host of the port's own, for pages that name their files from the root.
//!
//! Who may use one: everybody, when the port was opened as public or the operator said so of all; holders of a token of
//! the sandbox's workspace; and whoever followed a signed link, which a cookie then remembers. Other names below the
//! suffix are none of this module's business, since the API itself may be one.

use axum::extract::{Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use coppice_api::ErrorClass;
use http::header::{AUTHORIZATION, CACHE_CONTROL, COOKIE, LOCATION, SET_COOKIE};
use http::{HeaderMap, HeaderValue, Method, StatusCode, Uri};

use super::forward::{Passing, forward};
use super::head::{Authorization, OUR_COOKIES, Place};
use super::link::{LinkError, resolve};
use super::store::Link;
use super::{PreviewSuffix, Target, authority, paths, scheme};
use crate::Control;
use crate::auth;
use crate::error::ApiError;
use crate::input::uuid;

/// The query parameter by which a link comes to a preview host, and the cookie that remembers it.
pub(crate) const TOKEN: &str = "coppice_preview";

const _: () = assert!(TOKEN.as_bytes()[0] == OUR_COOKIES.as_bytes()[0] && TOKEN.len() > OUR_COOKIES.len());

/// The URL of a port's preview host, without a slash at its end.
pub(crate) fn url(control: &Control, sandbox: &str, port: u16) -> Option<String> {
    let suffix = control.config().ingress.suffix.as_ref()?;
    Some(format!("{}://{port}-{sandbox}.{}", scheme(control), suffix.authority()))
}

/// The middleware: requests to preview hosts go to sandboxes, all others on.
pub(crate) async fn divert(State(control): State<Control>, request: Request, next: Next) -> Response {
    let suffix = control.config().ingress.suffix.as_ref();
    let named = suffix.and_then(|suffix| parse(authority(request.uri(), request.headers())?, suffix));
    match named {
        None => next.run(request).await,
        Some((sandbox, port)) => {
            answer(&control, &sandbox, port, request).await.unwrap_or_else(ApiError::into_response)
        }
    }
}

/// Sandbox and port that a host stands for.
fn parse(authority: &str, suffix: &PreviewSuffix) -> Option<(String, u16)> {
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|b| b.is_ascii_digit()) => host,
        _ => authority,
    };
    let host = host.trim_end_matches('.').to_ascii_lowercase();
    let label = host.strip_suffix(&suffix.domain)?.strip_suffix('.')?;
    let (port, sandbox) = label.split_once('-')?;
    if !port.bytes().all(|b| b.is_ascii_digit()) {
        return None;
    }
    Some((uuid(sandbox)?, super::port(port.parse().ok()).ok()?))
}

async fn answer(control: &Control, sandbox: &str, port: u16, request: Request) -> Result<Response, ApiError> {
    let (token, target) = without_token(request.uri());
    let admitted = admit(control, sandbox, port, (request.uri(), request.headers()), token.as_deref()).await?;
    // The token must not stay in the address bar, nor reach the guest.
    if let Some(token) = token.filter(|_| matches!(*request.method(), Method::GET | Method::HEAD)) {
        return Ok(remember(control, &token, &target));
    }
    let passing = Passing {
        place: Place::OwnHost,
        authorization: if admitted.by_token { Authorization::Ours } else { Authorization::Services },
        websockets_only: !admitted.paths.is_empty(),
        target,
    };
    forward(control, &admitted.target, passing, request).await
}

/// Who may come in, and as whom.
struct Admitted {
    target: Target,
    paths: Vec<String>,
    by_token: bool,
}

async fn admit(
    control: &Control,
    sandbox: &str,
    port: u16,
    (uri, headers): (&Uri, &HeaderMap),
    token: Option<&str>,
) -> Result<Admitted, ApiError> {
    let ingress = &control.config().ingress;
    let target = |workspace| Target { workspace, sandbox: sandbox.to_owned(), port };
    let open = |workspace| Ok(Admitted { target: target(workspace), paths: Vec::new(), by_token: false });
    if let Some(token) = token {
        return by_link(resolve(control, token).await?, sandbox, port, uri);
    }
    if let Some(workspace) = ingress.store.public(sandbox, port).await? {
        return open(workspace);
    }
    if ingress.public_previews {
        return open(control.host().owner(sandbox).await?);
    }
    // The service's own credentials are not looked at: a preview that needs ours can't be told from one that doesn't exist.
    if headers.contains_key(AUTHORIZATION)
        && let Ok(caller) = auth::identify(&control.config().auth, headers).await
    {
        return Ok(Admitted { target: target(caller.workspace().to_owned()), paths: Vec::new(), by_token: true });
    }
    let mut refused = None;
    for token in remembered(headers) {
        match resolve(control, token).await.and_then(|link| by_link(link, sandbox, port, uri)) {
            Ok(admitted) => return Ok(admitted),
            Err(error) => refused = Some(error),
        }
    }
    Err(refused.unwrap_or_else(|| {
        ApiError::new(ErrorClass::Unauthorized, "preview_not_public", "this preview needs a link or a token").hint(
            "make a link with POST …/preview, open the port with `public: true`, or send `Authorization: Bearer pds_...`",
        )
    }))
}

fn by_link(link: Link, sandbox: &str, port: u16, uri: &Uri) -> Result<Admitted, ApiError> {
    if link.target.sandbox != sandbox || link.target.port != port {
        return Err(LinkError::OtherPort.into());
    }
    if !paths::opens(&link.paths, uri.path()) {
        return Err(LinkError::OtherPath.into());
    }
    Ok(Admitted { target: link.target, paths: link.paths, by_token: false })
}

/// The token of a query, and path and query without it.
fn without_token(uri: &Uri) -> (Option<String>, String) {
    let mut token = None;
    let mut rest: Vec<&str> = Vec::new();
    for pair in uri.query().unwrap_or_default().split('&') {
        match pair.split_once('=') {
            Some((TOKEN, value)) => token = Some(value.to_owned()),
            _ => rest.push(pair),
        }
    }
    let path = if uri.path().is_empty() { "/" } else { uri.path() };
    match uri.query() {
        Some(_) if token.is_none() || rest.iter().any(|pair| !pair.is_empty()) => {
            (token, format!("{path}?{}", rest.join("&")))
        }
        _ => (token, path.to_owned()),
    }
}

/// Tokens in cookies. A sandbox's pages may have set some of them for their neighbours, so there can be several.
fn remembered(headers: &HeaderMap) -> impl Iterator<Item = &str> {
    let values = headers.get_all(COOKIE).into_iter().filter_map(|value| value.to_str().ok());
    let pairs = values.flat_map(|value| value.split(';')).filter_map(|pair| pair.trim().split_once('='));
    pairs.filter(|(name, _)| *name == TOKEN).map(|(_, value)| value).take(4)
}

/// Sets the cookie, and leads to the page itself.
fn remember(control: &Control, token: &str, target: &str) -> Response {
    let secure = if scheme(control) == "https" { "; Secure" } else { "" };
    let cookie = format!("{TOKEN}={token}; Path=/; HttpOnly; SameSite=Lax{secure}");
    // A path may begin with two slashes, which would name another host.
    let place = format!("/{}", target.trim_start_matches('/'));
    let mut response = StatusCode::SEE_OTHER.into_response();
    let headers = response.headers_mut();
    headers.insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    for (name, value) in [(SET_COOKIE, cookie), (LOCATION, place)] {
        if let Ok(value) = HeaderValue::try_from(value) {
            headers.insert(name, value);
        }
    }
    response
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const ID: &str = "0f8fad5b-d9cb-469f-a165-70867728950e";

    #[test]
    fn hosts_name_a_port_and_a_sandbox() {
        let suffix: PreviewSuffix = "preview.example.org".parse().unwrap();
        let found = Some((ID.to_owned(), 3000));
        for good in [
            format!("3000-{ID}.preview.example.org"),
            format!("3000-{ID}.preview.example.org:8080"),
            format!("3000-{}.PREVIEW.Example.org.", ID.to_uppercase()),
        ] {
            assert_eq!(parse(&good, &suffix), found, "{good}");
        }
        for bad in [
            format!("0-{ID}.preview.example.org"),
            format!("22-{ID}.preview.example.org"),
            format!("65536-{ID}.preview.example.org"),
            format!("+80-{ID}.preview.example.org"),
            format!("80-{ID}.example.org"),
            format!("80-{ID}.xpreview.example.org"),
            format!("80-{ID}preview.example.org"),
            format!("a.80-{ID}.preview.example.org"),
            format!("{ID}.preview.example.org"),
            "preview.example.org".into(),
            "api.preview.example.org".into(),
            String::new(),
            ":".into(),
        ] {
            assert_eq!(parse(&bad, &suffix), None, "{bad}");
        }
    }

    #[test]
    fn tokens_are_taken_out_of_queries() {
        let split = |text: &str| without_token(&text.parse().unwrap());
        assert_eq!(split("/a?x=1&coppice_preview=t&y"), (Some("t".into()), "/a?x=1&y".into()));
        assert_eq!(split("/a?coppice_preview=t"), (Some("t".into()), "/a".into()));
        assert_eq!(split("/a?x&&"), (None, "/a?x&&".into()));
        assert_eq!(split("/a?"), (None, "/a?".into()));
        assert_eq!(split("http://h"), (None, "/".into()));
    }

    proptest! {
        #[test]
        fn nothing_panics(host in any::<String>()) {
            let suffix: PreviewSuffix = "a.b".parse().unwrap();
            let _named = parse(&host, &suffix);
            let _named = parse(&format!("{host}.a.b"), &suffix);
        }
    }
}
