//! nftables by its library, in process: rules are changed in one transaction per call, without a subprocess.

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::ptr::NonNull;
use std::sync::{Mutex, OnceLock, PoisonError};

use libloading::Library;
use serde_json::Value;

use crate::error::NetError;

/// The name that the library has had since its first release.
const SONAME: &str = "libnftables.so.1";

/// What to install.
pub(crate) const HINT: &str = "install libnftables (Debian, Ubuntu: `apt install libnftables1`)";

/// `NFT_CTX_OUTPUT_JSON`
const OUTPUT_JSON: c_uint = 1 << 4;

type Context = *mut c_void;

/// The functions of the library that are used here.
struct Functions {
    new: unsafe extern "C" fn(u32) -> Context,
    free: unsafe extern "C" fn(Context),
    buffer_output: unsafe extern "C" fn(Context) -> c_int,
    buffer_error: unsafe extern "C" fn(Context) -> c_int,
    set_flags: unsafe extern "C" fn(Context, c_uint),
    output: unsafe extern "C" fn(Context) -> *const c_char,
    error: unsafe extern "C" fn(Context) -> *const c_char,
    run: unsafe extern "C" fn(Context, *const c_char) -> c_int,
    /// Keeps the functions where they are.
    _library: Library,
}

/// The library doesn't promise that two contexts can be used at once.
static TURN: Mutex<()> = Mutex::new(());

fn functions() -> Result<&'static Functions, NetError> {
    static FUNCTIONS: OnceLock<Result<Functions, String>> = OnceLock::new();
    FUNCTIONS
        .get_or_init(|| load().map_err(|error| error.to_string()))
        .as_ref()
        .map_err(|error| NetError::Missing { what: format!("{SONAME} ({error})"), hint: HINT.to_owned() })
}

fn load() -> Result<Functions, libloading::Error> {
    // SAFETY: the library's initialisers only set up its own tables; the types are those of its public header
    // (nftables/libnftables.h), which belong to this soname; the library stays loaded for as long as the functions are kept.
    unsafe {
        let library = Library::new(SONAME)?;
        Ok(Functions {
            new: *library.get(b"nft_ctx_new\0")?,
            free: *library.get(b"nft_ctx_free\0")?,
            buffer_output: *library.get(b"nft_ctx_buffer_output\0")?,
            buffer_error: *library.get(b"nft_ctx_buffer_error\0")?,
            set_flags: *library.get(b"nft_ctx_output_set_flags\0")?,
            output: *library.get(b"nft_ctx_get_output_buffer\0")?,
            error: *library.get(b"nft_ctx_get_error_buffer\0")?,
            run: *library.get(b"nft_run_cmd_from_buffer\0")?,
            _library: library,
        })
    }
}

/// A context of the library. It belongs to the namespace of the thread that made it, and stays on that thread.
pub(crate) struct Nft {
    context: NonNull<c_void>,
    functions: &'static Functions,
}

impl Nft {
    /// A context for the calling thread's namespace.
    pub(crate) fn new() -> Result<Self, NetError> {
        let functions = functions()?;
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: 0 is NFT_CTX_DEFAULT; the result is checked before it is used.
        let context = NonNull::new(unsafe { (functions.new)(0) })
            .ok_or_else(|| NetError::Rules { what: "opening it", message: "no context".to_owned() })?;
        // SAFETY: the context is live, and this thread's alone.
        let failed =
            unsafe { (functions.buffer_output)(context.as_ptr()) | (functions.buffer_error)(context.as_ptr()) };
        let nft = Self { context, functions };
        if failed == 0 {
            Ok(nft)
        } else {
            Err(NetError::Rules { what: "opening it", message: "no buffers".to_owned() })
        }
    }

    /// Runs commands as one transaction: all of them take effect, or none.
    pub(crate) fn change(&mut self, what: &'static str, commands: &str) -> Result<(), NetError> {
        self.run(what, commands, 0).map(drop)
    }

    /// Asks something, and returns the objects of the answer.
    pub(crate) fn list(&mut self, what: &'static str, command: &str) -> Result<Vec<Value>, NetError> {
        let text = self.run(what, command, OUTPUT_JSON)?;
        let refused = |message: String| NetError::Rules { what, message };
        let mut answer: Value = serde_json::from_str(&text).map_err(|error| refused(error.to_string()))?;
        match answer.get_mut("nftables").map(Value::take) {
            Some(Value::Array(objects)) => Ok(objects),
            _ => Err(refused("an answer without objects".to_owned())),
        }
    }

    fn run(&mut self, what: &'static str, commands: &str, flags: c_uint) -> Result<String, NetError> {
        let refused = |message: String| NetError::Rules { what, message };
        let commands = CString::new(commands).map_err(|error| refused(error.to_string()))?;
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the context is live, and `&mut self` makes it this call's alone; the command is terminated and outlives the call.
        let status = unsafe {
            (self.functions.set_flags)(self.context.as_ptr(), flags);
            (self.functions.run)(self.context.as_ptr(), commands.as_ptr())
        };
        // SAFETY: both buffers belong to the context and are valid until its next call; reading one empties it.
        let (output, error) = unsafe {
            (text((self.functions.output)(self.context.as_ptr())), text((self.functions.error)(self.context.as_ptr())))
        };
        if status == 0 { Ok(output) } else { Err(refused(error.trim().chars().take(2000).collect())) }
    }
}

impl Drop for Nft {
    fn drop(&mut self) {
        let _turn = TURN.lock().unwrap_or_else(PoisonError::into_inner);
        // SAFETY: the context is live and nothing refers to it any more.
        unsafe { (self.functions.free)(self.context.as_ptr()) }
    }
}

/// # Safety
/// `pointer` is null or a terminated string.
unsafe fn text(pointer: *const c_char) -> String {
    if pointer.is_null() {
        return String::new();
    }
    // SAFETY: the caller's promise.
    unsafe { CStr::from_ptr(pointer) }.to_string_lossy().into_owned()
}
