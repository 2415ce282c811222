//! What tests of refusals share.

use std::panic::Location;

use gemmesh_candle::gemmesh_error;

/// The sentence of gemmesh's error without the place of the call, which must be in the file of the test.
#[track_caller]
pub fn sentence(error: &candle_core::Error) -> String {
    let error = gemmesh_error(error).unwrap_or_else(|| panic!("not gemmesh's: {error}"));
    let sentence = error.to_string();
    let Some(call) = error.call() else {
        return sentence;
    };
    let place = call.place().unwrap_or("nowhere");
    let test = Location::caller().file();
    assert!(place.starts_with(&format!("{test}:")), "{sentence}");
    sentence.replacen(&format!(" at {place}"), "", 1)
}
