//! What a caller may do: one table from route to who may call it and whose thing it is about, and one function that
//! every request passes before its handler.
//!
//! A route gets its line of the table where it is added to the router ([`Routes::add`]), so there is no route without
//! one. What another workspace has does not exist: 404, before anything else of the request is looked at. A handler
//! hands its caller's workspace to the host as well, which says the same once more.

use std::collections::HashMap;
use std::sync::OnceLock;

use axum::Router;
use axum::extract::{FromRequestParts as _, MatchedPath, RawPathParams, Request, State};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use axum::routing::MethodRouter;
use coppice_api::{ErrorClass, Role};
use http::header::ALLOW;
use http::{HeaderValue, Method};
use utoipa::openapi::OpenApi;
use utoipa::openapi::path::PathItem;
use utoipa_axum::router::{OpenApiRouter, UtoipaMethodRouter};

use crate::audit::{Journal, NewEntry};
use crate::auth::{Caller, identify, may_read_metrics};
use crate::error::ApiError;
use crate::input::{drain, uuid};
use crate::observe::RequestId;
use crate::{Control, check, openapi};

/// Who may call a route.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Who {
    /// Anybody, without a token.
    Anyone,
    /// As [`crate::MetricsAccess`] says, and admins.
    MetricsReader,
    /// Holders of a token.
    Member,
    /// Holders of a token of an admin's.
    Admin,
}

/// What the first name in a route's path stands for. Unless it is the caller's, the answer is 404.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Of {
    /// There is none.
    Nothing,
    /// A sandbox of the caller's workspace.
    Sandbox,
    /// A snapshot of the caller's workspace.
    Snapshot,
    /// A template that the caller's workspace may use.
    Template,
    /// A signed link to a port of a sandbox, which says by itself what it opens: its handler checks that.
    Link,
    /// A token of the caller's workspace, by its prefix.
    Token,
    /// The caller's workspace; of an admin's any that there is.
    Workspace,
    /// The same, or of an admin's one that there may not be yet.
    NewWorkspace,
}

/// A line of the table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Access {
    /// Who may call.
    pub who: Who,
    /// What it is about.
    pub of: Of,
    /// Whether it makes sandboxes, and is limited in rate.
    pub makes: bool,
}

const fn access(who: Who, of: Of) -> Access {
    Access { who, of, makes: false }
}

/// Nothing that concerns a tenant.
pub(crate) const OPEN: Access = access(Who::Anyone, Of::Nothing);
/// The server's metrics.
pub(crate) const METRICS: Access = access(Who::MetricsReader, Of::Nothing);
/// The caller's workspace as a whole.
pub(crate) const MEMBER: Access = access(Who::Member, Of::Nothing);
/// Makes a sandbox in the caller's workspace.
pub(crate) const CREATE: Access = Access { makes: true, ..MEMBER };
/// One sandbox.
pub(crate) const SANDBOX: Access = access(Who::Member, Of::Sandbox);
/// Makes sandboxes of one.
pub(crate) const FORK: Access = Access { makes: true, ..SANDBOX };
/// One snapshot.
pub(crate) const SNAPSHOT: Access = access(Who::Member, Of::Snapshot);
/// One template.
pub(crate) const TEMPLATE: Access = access(Who::Member, Of::Template);
/// Whatever a signed link opens.
pub(crate) const LINK: Access = access(Who::Anyone, Of::Link);
/// One token of the caller's workspace.
pub(crate) const TOKEN: Access = access(Who::Member, Of::Token);
/// A workspace, to look at.
pub(crate) const WORKSPACE: Access = access(Who::Member, Of::Workspace);
/// The whole server.
pub(crate) const ADMIN: Access = access(Who::Admin, Of::Nothing);
/// Any workspace, to change.
pub(crate) const ADMIN_WORKSPACE: Access = access(Who::Admin, Of::Workspace);
/// Any workspace, also one that comes into being by it.
pub(crate) const ADMIN_NEW_WORKSPACE: Access = access(Who::Admin, Of::NewWorkspace);

/// A route with its line of the table.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RouteRule {
    /// `None`: any.
    pub method: Option<Method>,
    /// With names in braces.
    pub path: String,
    /// Who may call it, and what it is about.
    pub access: Access,
}

/// The router while it is built, and the table with it.
pub(crate) struct Routes {
    router: OpenApiRouter<Control>,
    rules: Vec<RouteRule>,
}

impl Routes {
    pub(crate) fn new(document: OpenApi) -> Self {
        Self { router: OpenApiRouter::with_openapi(document), rules: Vec::new() }
    }

    /// Adds handlers that are described for OpenAPI, and who may call them.
    pub(crate) fn add(mut self, access: Access, routes: UtoipaMethodRouter<Control>) -> Self {
        for (path, item) in &routes.1.paths {
            let rule = |method| RouteRule { method: Some(method), path: path.clone(), access };
            self.rules.extend(methods(item).into_iter().map(rule));
        }
        Self { router: self.router.routes(routes), rules: self.rules }
    }

    /// The same for every method, at the path that is described and at those that go on like this.
    pub(crate) fn any(
        self,
        access: Access,
        described: UtoipaMethodRouter<Control>,
        ends: &[&str],
        handler: MethodRouter<Control>,
    ) -> Self {
        let paths: Vec<String> = described.1.paths.keys().cloned().collect();
        let Self { mut router, mut rules } = self.add(access, described);
        for path in paths.iter().flat_map(|path| [&""].into_iter().chain(ends).map(move |end| format!("{path}{end}"))) {
            router = router.route(&path, handler.clone());
            rules.push(RouteRule { method: None, path, access });
        }
        Self { router, rules }
    }

    pub(crate) fn into_parts(self) -> (Router<Control>, OpenApi, Vec<RouteRule>) {
        let (router, document) = self.router.split_for_parts();
        (router, document, self.rules)
    }
}

fn methods(item: &PathItem) -> Vec<Method> {
    let all = [
        (Method::GET, item.get.is_some()),
        (Method::PUT, item.put.is_some()),
        (Method::POST, item.post.is_some()),
        (Method::DELETE, item.delete.is_some()),
        (Method::OPTIONS, item.options.is_some()),
        (Method::HEAD, item.head.is_some()),
        (Method::PATCH, item.patch.is_some()),
        (Method::TRACE, item.trace.is_some()),
    ];
    all.into_iter().filter_map(|(method, there)| there.then_some(method)).collect()
}

/// All routes with who may call them: the table that every request is checked against.
#[must_use]
pub fn route_rules() -> Vec<RouteRule> {
    openapi::routes().into_parts().2
}

fn table() -> &'static HashMap<String, Vec<RouteRule>> {
    static TABLE: OnceLock<HashMap<String, Vec<RouteRule>>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let mut table: HashMap<String, Vec<RouteRule>> = HashMap::new();
        for rule in route_rules() {
            table.entry(rule.path.clone()).or_default().push(rule);
        }
        table
    })
}

/// The line for a request: 405 when the path has none for its method.
fn rule(method: &Method, path: &str) -> Result<&'static RouteRule, Vec<&'static str>> {
    let of_path = table().get(path).map_or(&[][..], Vec::as_slice);
    // What answers GET answers HEAD.
    let method = if *method == Method::HEAD { &Method::GET } else { method };
    let found = of_path.iter().find(|rule| rule.method.as_ref().is_none_or(|allowed| allowed == method));
    found.ok_or_else(|| of_path.iter().filter_map(|rule| rule.method.as_ref().map(Method::as_str)).collect())
}

/// What a handler made, when its path does not name it: for the audit log. An extension of the response.
#[derive(Debug, Clone)]
pub(crate) struct Named(pub(crate) String);

/// The middleware of every request.
pub(crate) async fn guard(State(control): State<Control>, mut request: Request, next: Next) -> Response {
    let path = request.uri().path();
    let under_v1 = path == "/v1" || path.starts_with("/v1/");
    let Some(matched) = request.extensions().get::<MatchedPath>().cloned() else {
        // No such route, which a stranger needn't know.
        return match identify(&control.config().auth, request.headers()).await {
            Err(error) if under_v1 => error.into_response(),
            _ => next.run(request).await,
        };
    };
    let rule = match rule(request.method(), matched.as_str()) {
        Ok(rule) => rule,
        Err(allowed) => {
            return match identify(&control.config().auth, request.headers()).await {
                Err(error) if under_v1 => error.into_response(),
                _ => not_allowed(&request, &allowed),
            };
        }
    };
    // Not a question for later: a request can't be borrowed while something is waited for.
    let needed = match rule.access.who {
        Who::Anyone => false,
        Who::MetricsReader => !may_read_metrics(control.config().metrics, &request),
        Who::Member | Who::Admin => true,
    };
    if !needed {
        return next.run(request).await;
    }
    let caller = match identify(&control.config().auth, request.headers()).await {
        Ok(caller) => caller,
        Err(error) => return error.into_response(),
    };

    let (mut parts, body) = request.into_parts();
    let name = RawPathParams::from_request_parts(&mut parts, &control).await;
    let name = name.map(|names| names.iter().next().map(|(_, value)| value.to_owned()));
    let name = name.map_err(|_| ApiError::route_not_found(parts.uri.path()));
    parts.extensions.insert(caller.clone());
    request = Request::from_parts(parts, body);
    let entry = match entry(&control, rule, &caller, &request, name.as_ref().ok()) {
        Ok(entry) => entry,
        Err(error) => return error.into_response(),
    };
    let allowed = match name {
        Ok(name) => authorize(&control, rule.access, &caller, name.as_deref()).await,
        Err(error) => Err(error),
    };
    let response = match allowed {
        Ok(()) => next.run(request).await,
        Err(error) => {
            // A client that sends before it reads gets the answer and not a reset connection.
            drain(&mut request.into_body().into_data_stream()).await;
            error.into_response()
        }
    };
    if let Some(entry) = entry {
        entry.end(&response);
    }
    response
}

/// Whether the caller may do this with that: the one place where it is decided.
async fn authorize(control: &Control, access: Access, caller: &Caller, name: Option<&str>) -> Result<(), ApiError> {
    owned(control, access.of, caller, name.unwrap_or_default()).await?;
    let admin = caller.role() == Role::Admin;
    if matches!(access.who, Who::Admin | Who::MetricsReader) && !admin {
        return Err(ApiError::new(ErrorClass::Forbidden, "admin_only", "this needs a token of an admin's")
            .hint("`coppice up` writes one to credentials.env in its data directory"));
    }
    if access.makes && !control.create_rate().admit(caller.workspace()) {
        let message = "too many creates and forks of this workspace in a moment";
        return Err(ApiError::new(ErrorClass::RateLimited, "rate_limited", message));
    }
    Ok(())
}

/// Whether the thing is the caller's, or 404.
async fn owned(control: &Control, of: Of, caller: &Caller, name: &str) -> Result<(), ApiError> {
    let workspace = caller.workspace();
    match of {
        Of::Nothing | Of::Link => Ok(()),
        Of::Sandbox => {
            let id = uuid(name).ok_or_else(|| ApiError::not_found("sandbox", name))?;
            Ok(control.host().get(workspace, &id).await.map(drop)?)
        }
        Of::Snapshot => {
            let id = uuid(name).ok_or_else(|| ApiError::not_found("snapshot", name))?;
            Ok(control.host().get_snapshot(workspace, &id).await.map(drop)?)
        }
        Of::Template if !check::is_template_name(name) => Err(ApiError::not_found("template", name)),
        Of::Template => Ok(control.host().template(workspace, name).await.map(drop)?),
        Of::Token => match control.store() {
            Some(store) if store.has(workspace, name).await? => Ok(()),
            Some(_) => Err(ApiError::not_found("token", name)),
            None => Err(ApiError::no_tokens()),
        },
        Of::Workspace | Of::NewWorkspace if caller.role() != Role::Admin => {
            if name == workspace { Ok(()) } else { Err(ApiError::not_found("workspace", name)) }
        }
        // The handler says what is wrong with a name that can't be one.
        Of::NewWorkspace => Ok(()),
        Of::Workspace => match control.store() {
            Some(store) if store.workspace(name).await?.is_some() => Ok(()),
            Some(_) => Err(ApiError::not_found("workspace", name)
                .hint("`coppice workspace list` shows them; a first token makes one: `coppice token create LABEL --workspace NAME`")),
            None => Err(ApiError::no_tokens()),
        },
    }
}

fn not_allowed(request: &Request, allowed: &[&str]) -> Response {
    let mut response = ApiError::method_not_allowed(request.method().as_str(), request.uri().path()).into_response();
    if let Ok(allowed) = HeaderValue::from_str(&allowed.join(", ")) {
        response.headers_mut().insert(ALLOW, allowed);
    }
    response
}

/// An entry of the audit log for what changes something.
fn entry(
    control: &Control,
    rule: &RouteRule,
    caller: &Caller,
    request: &Request,
    name: Option<&Option<String>>,
) -> Result<Option<Pending>, ApiError> {
    let reads = matches!(*request.method(), Method::GET | Method::HEAD | Method::OPTIONS);
    // Any method: what passes through to a guest is the guest's business.
    let Some(store) = control.store().filter(|_| !reads && rule.method.is_some()) else { return Ok(None) };
    if !store.journal.has_room() {
        let message = "the audit log can't be written fast enough; nothing was done";
        return Err(ApiError::new(ErrorClass::Transient, "audit_behind", message));
    }
    let entry = NewEntry {
        workspace: caller.workspace().to_owned(),
        token: caller.token_prefix().unwrap_or_default().to_owned(),
        method: request.method().as_str().to_owned(),
        route: rule.path.clone(),
        resource: name.and_then(Option::as_deref).unwrap_or_default().chars().take(128).collect(),
        status: 0,
        request_id: request.extensions().get::<RequestId>().map(|id| id.0.clone()).unwrap_or_default(),
    };
    Ok(Some(Pending { journal: store.journal.clone(), entry: Some(entry) }))
}

/// An entry whose end is not known yet. It is written in any case: 499 when the client hung up.
struct Pending {
    journal: Journal,
    entry: Option<NewEntry>,
}

impl Pending {
    fn end(mut self, response: &Response) {
        if let Some(mut entry) = self.entry.take() {
            entry.status = response.status().as_u16();
            if let Some(Named(name)) = response.extensions().get() {
                entry.resource.clone_from(name);
            }
            self.journal.record(entry);
        }
    }
}

impl Drop for Pending {
    fn drop(&mut self) {
        if let Some(mut entry) = self.entry.take() {
            entry.status = if std::thread::panicking() { 500 } else { 499 };
            self.journal.record(entry);
        }
    }
}
