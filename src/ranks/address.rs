//! Addresses, which are texts that ranks agree on, and the names of sockets that follow from them.
//!
//! Every process on the machine can read the names of sockets (/proc/net/unix), and can bind a free name that it knows.
//! So each name is a one-way hash of the address and of the name's purpose, and tells nothing of the address or of
//! other names. A process that does not know the address cannot bind a name before it has been used. A name that has
//! been used may then belong to a different process, but ranks do not need it, because there are more.

use std::fmt::{self, Write};
use std::io;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::SocketAddr;

use hmac_sha256::{HMAC, Hash};
use rustix::rand::{GetRandomFlags, getrandom};

use super::secret::Secret;

/// How many names rank 0 may listen at. Making a group shows one of them to every process on the machine.
pub const NAMES: usize = 64;

/// The beginning of an address that [`draw`] has made.
const DRAWN: &str = "drawn:";
const SECRET_BYTES: usize = 16;
/// A longer address is not shown whole.
const SHOWN: usize = 80;

/// A text that the ranks of a group agree on. It may be a secret, so Debug shows what [`shown`] shows.
#[derive(Clone, Default, PartialEq, Eq)]
pub struct Address {
    text: Secret<String>,
    is_secret: bool,
}

impl Address {
    /// An address that a user or a launcher has given. It is a secret if it has the form of a drawn one.
    pub fn of(text: &str) -> Address {
        Address {
            is_secret: has_drawn_form(text),
            text: Secret::new(text.into()),
        }
    }

    /// An address that is a secret, whatever its form.
    pub fn of_secret(text: &Secret<String>) -> Address {
        Address {
            is_secret: true,
            ..Address::of(text.reveal())
        }
    }

    /// A different address for this `part` of the ranks.
    pub fn for_part(&self, part: &str) -> Address {
        Address {
            text: Secret::new(format!("{}/{part}", self.reveal())),
            is_secret: self.is_secret,
        }
    }

    /// The text, for what derives from it. It must not get into a text that is shown.
    pub fn reveal(&self) -> &str {
        self.text.reveal()
    }
}

impl fmt::Debug for Address {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&shown(self))
    }
}

/// Draws an address of 128 random bits, which no one can guess.
pub fn draw() -> io::Result<Address> {
    let mut secret = [0; SECRET_BYTES];
    // So few bytes come in one piece or not at all.
    let drawn = getrandom(&mut secret, GetRandomFlags::empty())?;
    if drawn < SECRET_BYTES {
        return Err(io::ErrorKind::UnexpectedEof.into());
    }
    Ok(Address::of(&format!("{DRAWN}{}", hex(&secret))))
}

/// True if [`draw`] has made `address`.
pub fn is_drawn(address: &Address) -> bool {
    has_drawn_form(address.reveal())
}

fn has_drawn_form(address: &str) -> bool {
    let secret = address.strip_prefix(DRAWN);
    secret.is_some_and(|secret| {
        secret.len() == 2 * SECRET_BYTES && secret.bytes().all(|byte| byte.is_ascii_hexdigit())
    })
}

/// An address as errors show it, cut short. Of a secret one it has only enough to tell it from others, because not
/// only ranks read errors.
pub fn shown(address: &Address) -> String {
    let tag = || hex(&derive(address, "shown")[..4]);
    if is_drawn(address) {
        return format!("{DRAWN}{}…", tag());
    }
    if address.is_secret {
        return format!("secret:{}…", tag());
    }
    let address = address.reveal();
    if address.len() <= SHOWN {
        return address.into();
    }
    let begin: String = address.chars().take(SHOWN / 2).collect();
    format!("{begin}… ({} bytes, {})", address.len(), tag())
}

/// The names that rank 0 may listen at, in the order in which it tries them.
pub fn meeting_names(address: &Address) -> io::Result<Vec<SocketAddr>> {
    let names = 0..NAMES;
    names
        .map(|number| name(address, &format!("meeting {number}")))
        .collect()
}

/// The name at which rank 0 listens to say that it has only one descriptor left, so that it can accept no connection.
pub fn last_descriptor_name(address: &Address) -> io::Result<SocketAddr> {
    name(address, "last descriptor")
}

/// The names of `meeting_names` as texts, for tests.
pub fn meeting_texts(address: &str) -> Vec<String> {
    let names = meeting_names(&Address::of(address)).unwrap_or_default();
    let texts = names.iter().filter_map(SocketAddr::as_abstract_name);
    texts
        .map(|name| String::from_utf8_lossy(name).into_owned())
        .collect()
}

/// The name at which the launcher of the ranks at `address` listens for reports.
pub fn report_name(address: &Address) -> io::Result<SocketAddr> {
    name(address, "reports")
}

/// A token by which a report shows that its process knows `address`.
pub fn report_token(address: &Address) -> Secret<[u8; 32]> {
    Secret::new(derive(address, "token of reports"))
}

/// The name that the launcher of the ranks at `address` takes when the process of `rank` has ended.
pub fn end_name(address: &Address, rank: usize) -> io::Result<SocketAddr> {
    name(address, &format!("end of rank {rank}"))
}

fn name(address: &Address, purpose: &str) -> io::Result<SocketAddr> {
    let hash = hex(&derive(address, purpose)[..16]);
    SocketAddr::from_abstract_name(format!("gemmesh/{hash}"))
}

/// Derives a key. The address is hashed first, because HMAC does not tell keys apart that differ only in zeros at their
/// end.
fn derive(address: &Address, purpose: &str) -> [u8; 32] {
    HMAC::mac(purpose, Hash::hash(address.reveal().as_bytes()))
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        // Writing to a string cannot fail.
        let _ = write!(text, "{byte:02x}");
        text
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    fn names(address: &str) -> Vec<Vec<u8>> {
        let address = &Address::of(address);
        let mut all = meeting_names(address).unwrap();
        all.push(report_name(address).unwrap());
        all.push(last_descriptor_name(address).unwrap());
        all.push(end_name(address, 1).unwrap());
        all.iter()
            .map(|name| name.as_abstract_name().unwrap().to_vec())
            .collect()
    }

    #[test]
    fn any_text_is_an_address_of_its_own() {
        let long = "ü".repeat(100_000);
        let texts = [
            "",
            "\0",
            "a",
            "a\0",
            "a\0b",
            "ä",
            "a/launcher",
            &long,
            &long[2..],
        ];
        let all: Vec<_> = texts.iter().flat_map(|text| names(text)).collect();
        let distinct: HashSet<_> = all.iter().collect();
        assert_eq!(distinct.len(), texts.len() * (NAMES + 3));
        assert!(all.iter().all(|name| name.len() == 40));
        assert_eq!(names(&long), names(&long), "the same on every rank");
    }

    #[test]
    fn what_is_drawn_differs_and_is_neither_in_names_nor_in_errors() {
        let (one, two) = (draw().unwrap(), draw().unwrap());
        assert_ne!(one, two);
        let text = one.reveal();
        assert!(is_drawn(&one));
        assert!(!has_drawn_form("drawn:by hand") && !has_drawn_form(&text[1..]));
        let secret = text.strip_prefix(DRAWN).unwrap();
        for piece in [&secret[..8], &secret[24..]] {
            assert!(!shown(&one).contains(piece));
            assert!(!format!("{one:?}").contains(piece));
            assert!(!shown(&one.for_part("host 1")).contains(piece));
            for name in names(text) {
                assert!(!String::from_utf8(name).unwrap().contains(piece));
            }
        }
        assert_ne!(shown(&one), shown(&two));
    }

    #[test]
    fn of_a_secret_of_any_form_errors_show_a_tag() {
        let secret = |text: &str| Address::of_secret(&Secret::new(text.into()));
        let (one, two) = (secret("by hand"), secret("by another"));
        assert!(!shown(&one).contains("by hand") && !format!("{one:?}").contains("by hand"));
        assert_ne!(shown(&one), shown(&two));
        // What it derives is what the others derive of the text.
        assert_eq!(meeting_texts("by hand").len(), NAMES);
        assert_eq!(report_token(&one), report_token(&Address::of("by hand")));
    }

    #[test]
    fn errors_show_an_address_and_of_a_long_one_the_beginning() {
        assert_eq!(shown(&Address::of("job 7")), "job 7");
        let long = "job ".repeat(1000);
        let shown = shown(&Address::of(&long));
        assert!(shown.len() < 100 && shown.starts_with("job job"), "{shown}");
        assert!(shown.contains("4000 bytes"), "{shown}");
    }
}
