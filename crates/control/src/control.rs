//! The API as a value: what every handler can reach, and the router made of them.

use std::sync::{Arc, OnceLock};

use axum::Router;
use axum::middleware::{from_fn, from_fn_with_state};
use axum::response::{IntoResponse, Response};
use coppice_api::ErrorClass;
use coppice_host::HostApi;
use http::Uri;
use metrics_exporter_prometheus::{Matcher, PrometheusBuilder, PrometheusHandle};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use tower_http::catch_panic::CatchPanicLayer;

use crate::config::{Auth, ControlConfig};
use crate::error::ApiError;
use crate::ingress::{Gate, hosts};
use crate::quota::Quotas;
use crate::rate::CreateRate;
use crate::{TokenStore, authorize, observe, openapi};

/// Why the API could not be set up.
#[derive(Debug, thiserror::Error)]
pub enum ControlError {
    /// Another recorder of metrics is installed in this process.
    #[error("metrics can't be recorded: {0}")]
    Metrics(String),
}

/// The HTTP API over one host. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Control {
    inner: Arc<Inner>,
}

#[derive(Debug)]
struct Inner {
    host: Arc<dyn HostApi>,
    config: ControlConfig,
    metrics: PrometheusHandle,
    output: Arc<Semaphore>,
    gate: Arc<Gate>,
    quotas: Quotas,
    create_rate: CreateRate,
    stop: Stop,
}

/// The two moments of a shutdown that a running request hears of.
#[derive(Debug, Clone, Default)]
pub(crate) struct Stop {
    /// The signal came: what never ends by itself ends now.
    pub(crate) soon: CancellationToken,
    /// The grace is over: everything ends now.
    pub(crate) now: CancellationToken,
}

impl Control {
    /// The API over a host. The first call of a process installs its recorder of metrics.
    ///
    /// # Errors
    /// When another recorder is installed.
    pub fn new(host: Arc<dyn HostApi>, config: ControlConfig) -> Result<Self, ControlError> {
        let metrics = metrics_handle().map_err(ControlError::Metrics)?;
        let kib = usize::try_from(config.limits.exec_output_total_kib).unwrap_or(Semaphore::MAX_PERMITS);
        let output = Arc::new(Semaphore::new(kib.min(Semaphore::MAX_PERMITS)));
        let gate = Gate::new(config.limits.guest_connections, config.limits.connections_per_sandbox);
        let create_rate = CreateRate::new(config.limits.create_rate);
        let (quotas, stop) = (Quotas::default(), Stop::default());
        Ok(Self { inner: Arc::new(Inner { host, config, metrics, output, gate, quotas, create_rate, stop }) })
    }

    /// All routes. A connection's address, for [`crate::MetricsAccess::Loopback`], is expected as a request extension
    /// [`crate::Peer`], which [`Control::serve`] sets.
    pub fn router(&self) -> Router {
        let (router, _, _) = openapi::routes().into_parts();
        router
            .fallback(|uri: Uri| async move { ApiError::route_not_found(uri.path()) })
            .layer(from_fn_with_state(self.clone(), authorize::guard))
            .layer(from_fn_with_state(self.clone(), hosts::divert))
            .layer(CatchPanicLayer::custom(panicked))
            .layer(from_fn(observe::observe))
            .with_state(self.clone())
    }

    pub(crate) fn host(&self) -> &dyn HostApi {
        &*self.inner.host
    }

    pub(crate) fn config(&self) -> &ControlConfig {
        &self.inner.config
    }

    /// Tokens and workspaces; none when auth is off.
    pub(crate) fn store(&self) -> Option<&TokenStore> {
        match &self.inner.config.auth {
            Auth::Tokens(store) => Some(store),
            Auth::Off => None,
        }
    }

    pub(crate) fn quotas(&self) -> &Quotas {
        &self.inner.quotas
    }

    pub(crate) fn create_rate(&self) -> &CreateRate {
        &self.inner.create_rate
    }

    pub(crate) fn metrics(&self) -> &PrometheusHandle {
        &self.inner.metrics
    }

    /// What all buffered outputs of commands share, in KiB.
    pub(crate) fn output(&self) -> &Arc<Semaphore> {
        &self.inner.output
    }

    /// How many connections into sandboxes there are.
    pub(crate) fn gate(&self) -> &Arc<Gate> {
        &self.inner.gate
    }

    pub(crate) fn stop(&self) -> &Stop {
        &self.inner.stop
    }
}

/// The process's recorder. There can be one, so several APIs in a process (tests) share it.
fn metrics_handle() -> Result<PrometheusHandle, String> {
    static HANDLE: OnceLock<Result<PrometheusHandle, String>> = OnceLock::new();
    HANDLE
        .get_or_init(|| {
            let buckets =
                [0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0];
            PrometheusBuilder::new()
                .set_buckets_for_metric(Matcher::Suffix("_seconds".into()), &buckets)
                .and_then(PrometheusBuilder::install_recorder)
                .map_err(|error| error.to_string())
        })
        .clone()
}

#[expect(clippy::needless_pass_by_value, reason = "the signature that tower-http asks for")]
fn panicked(panic: Box<dyn std::any::Any + Send>) -> Response {
    let text = panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
    tracing::error!(panic = text.unwrap_or("?"), "a handler panicked");
    ApiError::new(ErrorClass::Internal, "internal", "internal error: a request handler failed").into_response()
}
