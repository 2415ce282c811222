//! Values that no error, report, trace or Debug shows.

use std::fmt;

use hmac_sha256::Hash;

/// A key, or what a key can be derived from. It has no Display, and Debug does not show it.
#[derive(Clone, Default)]
pub struct Secret<T>(T);

impl<T> Secret<T> {
    pub fn new(value: T) -> Secret<T> {
        Secret(value)
    }

    /// The value, for what derives from it. It must not get into a text.
    pub fn reveal(&self) -> &T {
        &self.0
    }
}

impl<T> fmt::Debug for Secret<T> {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str("secret")
    }
}

/// The time that the comparison takes does not depend on where two values differ.
impl<T: AsRef<[u8]>> PartialEq for Secret<T> {
    fn eq(&self, other: &Secret<T>) -> bool {
        Hash::hash(self.0.as_ref()) == Hash::hash(other.0.as_ref())
    }
}

impl<T: AsRef<[u8]>> Eq for Secret<T> {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_secret_is_compared_and_not_shown() {
        let [one, other] = ["one secret", "other"].map(Secret::new);
        assert!(one == one.clone() && one != other);
        let shown = format!("{one:?} {:#?}", Some(&other));
        assert!(
            !shown.contains("one") && !shown.contains("other"),
            "{shown}"
        );
        assert_eq!(format!("{one:?}"), "secret");
    }
}
