//! The bytes that come to a connection on which rank 0 waits for the other ranks.

use std::io::Write;
use std::net::Shutdown;
use std::os::linux::net::SocketAddrExt;
use std::os::unix::net::{SocketAddr, UnixListener};

use super::PROTOCOL_VERSION;
use super::attempt::Rendezvous;
use super::introduction::{Guest, Hello, Introduced, MAX_HELLO, Prefix, Stranger};
use crate::ranks::identity::Identity;
use crate::ranks::wire;

thread_local! {
    static HOST: Rendezvous<'static> = {
        Rendezvous::for_fuzzing(Box::leak(Box::new(Identity::of_test(0, 4, ""))))
    };
}

impl<'a> Rendezvous<'a> {
    /// Rank 0 while it waits for others.
    pub fn for_fuzzing(identity: &'a Identity) -> Rendezvous<'a> {
        let name = format!("gemmesh/fuzz/{}", std::process::id());
        let address = SocketAddr::from_abstract_name(name).expect("an address");
        let listener = UnixListener::bind_addr(&address).expect("a listener");
        let hello = Hello::new(identity).expect("the kernel's id");
        let spare = listener.try_clone().expect("a spare");
        Rendezvous::new(identity, hello, [listener, spare], PROTOCOL_VERSION).expect("a host")
    }
}

/// The first byte says how much of the rest comes first.
pub fn parse(data: &[u8]) {
    let Some((&first, sent)) = data.split_first() else {
        return;
    };
    let Ok((other, stream)) = wire::pair() else {
        return;
    };
    let mut stranger = Stranger::new(stream);
    let (early, late) = sent.split_at(sent.len().min(first.into()));
    let _ = (&*other).write(early);
    if let Introduced::NotYet = stranger.listen(PROTOCOL_VERSION) {
        let _ = (&*other).write(late);
        let _ = other.shutdown(Shutdown::Write);
        if let Introduced::Rank(guest) = stranger.listen(PROTOCOL_VERSION) {
            judge(&guest);
        }
    }
    assert!(stranger.bytes.len() <= Prefix::BYTES + MAX_HELLO + 1024);
}

fn judge(guest: &Guest) {
    if let Err(error) = HOST.with(|host| host.judge(guest)) {
        let _ = error.to_string();
    }
}

/// The introductions of a rank, of the same rank on a different host, and of one with a different version.
pub fn seeds() -> Vec<Vec<u8>> {
    let hello = Hello::new(&Identity::of_test(0, 4, "")).expect("the kernel's id");
    let elsewhere = Hello {
        boot_id: "another".into(),
        ..hello.clone()
    };
    let versions = [PROTOCOL_VERSION, PROTOCOL_VERSION, PROTOCOL_VERSION + 1];
    let introductions = versions.into_iter().zip([&hello, &elsewhere, &hello]);
    let bytes = introductions.map(|(version, hello)| {
        let words = serde_json::to_vec(hello).unwrap_or_default();
        let prefix = Prefix {
            version,
            rank: 1,
            length: words.len() as u32,
        };
        [&[10], &prefix.encode()[..], &words].concat()
    });
    bytes.collect()
}
