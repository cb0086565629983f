//! Files in a sandbox. Contents are streamed both ways and never held whole.

use std::io;

use bytes::Bytes;
use coppice_api::{DirEntry, DirListing, WriteReply};
use futures::{Stream, TryStreamExt};
use reqwest::header::{CONTENT_LENGTH, CONTENT_TYPE};
use reqwest::{Body, Method, Response};

use crate::transport::QUICK;
use crate::{Client, ClientError};

const READ: &str = "read the file";

/// Contents for a file.
#[derive(Debug)]
pub struct WriteBody {
    body: Body,
    size: Option<u64>,
}

impl WriteBody {
    /// From a stream. `size` when it is known, and then it must be right.
    pub fn stream(stream: impl Stream<Item = io::Result<Bytes>> + Send + 'static, size: Option<u64>) -> Self {
        Self { body: Body::wrap_stream(stream), size }
    }
}

impl<T: Into<Bytes>> From<T> for WriteBody {
    fn from(bytes: T) -> Self {
        Self { body: Body::from(bytes.into()), size: None }
    }
}

/// A file being read.
#[derive(Debug)]
pub struct FileBody {
    client: Client,
    response: Response,
}

impl FileBody {
    /// The next piece; `None` at the end.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, ClientError> {
        self.response.chunk().await.map_err(|error| self.client.transport(READ, error))
    }

    /// All of it, if it is not larger than `limit`.
    pub async fn bytes(self, limit: usize) -> Result<Bytes, ClientError> {
        self.client.body(READ, self.response, limit).await
    }
}

impl Client {
    /// Opens a file for reading.
    pub async fn read_file(&self, id: &str, path: &str) -> Result<FileBody, ClientError> {
        let request = self.v1(Method::GET, &["sandboxes", id, "fs"]).query(&[("path", path)]);
        let response = self.send(READ, request).await?;
        Ok(FileBody { client: self.clone(), response })
    }

    /// Writes a file, complete or not at all; makes the directories above it.
    pub async fn write_file(
        &self,
        id: &str,
        path: &str,
        body: impl Into<WriteBody>,
    ) -> Result<WriteReply, ClientError> {
        let WriteBody { body, size } = body.into();
        let mut request = self.v1(Method::PUT, &["sandboxes", id, "fs"]).query(&[("path", path)]).body(body);
        request = request.header(CONTENT_TYPE, "application/octet-stream");
        if let Some(size) = size {
            request = request.header(CONTENT_LENGTH, size);
        }
        self.json("write the file", request).await
    }

    /// Entries of a directory.
    pub async fn list_dir(&self, id: &str, path: &str) -> Result<Vec<DirEntry>, ClientError> {
        let request = self.v1(Method::GET, &["sandboxes", id, "fs", "dir"]).query(&[("path", path)]).timeout(QUICK);
        let listing: DirListing = self.json("list the directory", request).await?;
        Ok(listing.entries)
    }

    /// One entry, lstat semantics.
    pub async fn stat(&self, id: &str, path: &str) -> Result<DirEntry, ClientError> {
        let request = self.v1(Method::GET, &["sandboxes", id, "fs", "stat"]).query(&[("path", path)]).timeout(QUICK);
        self.json("look at the file", request).await
    }

    /// Removes a file or a tree.
    pub async fn remove(&self, id: &str, path: &str) -> Result<(), ClientError> {
        let request = self.v1(Method::DELETE, &["sandboxes", id, "fs"]).query(&[("path", path)]).timeout(QUICK);
        self.done("remove the file", request).await
    }
}

impl From<FileBody> for WriteBody {
    fn from(file: FileBody) -> Self {
        let size = file.response.content_length();
        Self::stream(file.response.bytes_stream().map_err(io::Error::other), size)
    }
}
