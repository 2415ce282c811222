//! The transport of ranks that are threads of one process and play several hosts, for tests.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::{Message, Transport};
use crate::error::Result;

/// Messages by sender and receiver, in the order in which they were sent.
type SentMessages = BTreeMap<[usize; 2], VecDeque<Vec<u8>>>;

/// What has been sent and not received.
#[derive(Clone, Debug, Default)]
pub struct Mailboxes(Arc<Mutex<SentMessages>>);

impl Mailboxes {
    fn lock(&self) -> MutexGuard<'_, SentMessages> {
        // Each change is one call.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Transport<Vec<u8>, Box<dyn Message>> for Mailboxes {
    fn send(&self, ends: [usize; 2], bytes: Vec<u8>) -> Result<Box<dyn Message>> {
        self.lock()
            .entry(ends)
            .or_default()
            .push_back(bytes.clone());
        Ok(Box::new(Sent(Some(bytes))))
    }

    fn receive(&self, ends: [usize; 2], _: Vec<u8>) -> Result<Box<dyn Message>> {
        let mailboxes = self.clone();
        Ok(Box::new(AwaitedMessage { ends, mailboxes }))
    }
}

/// A message in its mailbox. It keeps the sender's bytes.
struct Sent(Option<Vec<u8>>);

impl Message for Sent {
    fn take_if_ended(&mut self) -> Result<Option<Vec<u8>>> {
        Ok(self.0.take())
    }
}

/// A message that may not have been sent.
struct AwaitedMessage {
    ends: [usize; 2],
    mailboxes: Mailboxes,
}

impl Message for AwaitedMessage {
    fn take_if_ended(&mut self) -> Result<Option<Vec<u8>>> {
        let mut messages = self.mailboxes.lock();
        Ok(messages.get_mut(&self.ends).and_then(VecDeque::pop_front))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn messages_of_a_sender_arrive_in_the_order_in_which_they_were_sent() {
        let mailboxes = Mailboxes::default();
        let receive = |ends| mailboxes.receive(ends, Vec::new()).unwrap();
        let (mut from_0, mut from_1) = (receive([0, 2]), receive([1, 2]));
        for (ends, byte) in [([0, 2], 1), ([0, 2], 2), ([2, 1], 3)] {
            let mut sent = mailboxes.send(ends, vec![byte]).unwrap();
            assert_eq!(sent.take_if_ended(), Ok(Some(vec![byte])));
        }
        assert_eq!(from_0.take_if_ended(), Ok(Some(vec![1])));
        assert_eq!(from_0.take_if_ended(), Ok(Some(vec![2])));
        assert_eq!(from_0.take_if_ended(), Ok(None));
        assert_eq!(from_1.take_if_ended(), Ok(None));
    }
}
