//! Errors in other languages: names of this crate in a sentence become those that the language has.

use super::{Error, Kind};

/// A language that calls this library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Dialect {
    /// The package `gemmesh`.
    Python,
    /// The header `gemmesh.h`.
    C,
}

/// What the items of a type are called in Python and in C: `{}` stands for the item, `{A}` for it in capitals.
#[rustfmt::skip]
const TYPES: [[&str; 3]; 11] = [
    ["Builder", "the option {}", "{} of gemmesh_group_options"],
    ["Config", "the configuration's {}", "the configuration's {}"],
    ["DType", "\"{a}\"", "GEMMESH_{A}"],
    ["gemmesh", "gemmesh.{}", "gemmesh's {}"],
    ["Group", "Group.{}", "gemmesh_group_{}"],
    ["Matrix", "Matrix.{}", "gemmesh_matrix_{}"],
    ["Numerics", "\"{a}\"", "GEMMESH_NUMERICS_{A}"],
    ["Route", "\"{a}\"", "GEMMESH_ROUTE_{A}"],
    ["Scales", "{}", "{}"],
    ["ShardedMatrix", "Sharded.{}", "gemmesh_sharded_{}"],
    ["WeightLayout", "weight_layout=\"{a}\"", "GEMMESH_WEIGHTS_{A}"],
];

/// Items that have other names there.
#[rustfmt::skip]
const ITEMS: [[&str; 3]; 15] = [
    ["Builder::arrival_timeout", "the option arrival_timeout", "arrival_timeout_ms of gemmesh_group_options"],
    ["Builder::host_timeout", "the option host_timeout", "host_timeout_ms of gemmesh_group_options"],
    ["Builder::timeout", "the option timeout", "timeout_ms of gemmesh_group_options"],
    ["Config::route", "route of Group.prepare", "route of gemmesh_product"],
    ["Group::connect_with", "Group.from_callback", "gemmesh_group_connect_with"],
    ["Group::sharded", "Group.sharded", "gemmesh_sharded_new"],
    ["Group::sharded_rows", "Group.sharded", "gemmesh_sharded_new_by_rank"],
    ["Group::sharded_staged", "Group.sharded", "gemmesh_sharded_new_staged"],
    ["Group::sharded_with_capacity", "Group.sharded", "gemmesh_sharded_new_with_capacity"],
    ["Group::zeros", "Group.zeros", "gemmesh_matrix_zeros"],
    ["Matrix::copy_from", "Matrix.copy_from", "gemmesh_copy"],
    ["Matrix::copy_from_host", "Matrix.frombytes", "gemmesh_copy_from_host"],
    ["Matrix::copy_to_host", "Matrix.tobytes", "gemmesh_copy_to_host"],
    ["ShardedMatrix::shard", "Sharded.shard", "gemmesh_sharded_own_rows"],
    ["ShardedMatrix::view", "Sharded.whole", "gemmesh_sharded_whole"],
];

/// Options that are set to a value, which `{}` stands for.
#[rustfmt::skip]
const OPTIONS: [[&str; 3]; 3] = [
    ["output_dtype", "dtype={}", "output_dtype {}"],
    ["weight_dtype", "a b of {}", "weight_dtype {}"],
    ["weight_layout", "{}", "weight_layout {}"],
];

impl Dialect {
    /// The sentence of an error in this language. What the user's program has said, which stands at the end, stays as it
    /// is.
    pub fn sentence(self, error: &Error) -> String {
        let sentence = error.to_string();
        let said = match error.kind() {
            Kind::ProgramFailed { reason, .. } => reason,
            Kind::RankPanicked {
                message: Some(message),
            } => message,
            _ => "",
        };
        match sentence.strip_suffix(said) {
            Some(own) => self.of(own) + said,
            None => self.of(&sentence),
        }
    }

    /// Words of this library in this language.
    pub fn of(self, sentence: &str) -> String {
        let mut words = String::with_capacity(sentence.len());
        let mut rest = sentence;
        while let Some(colons) = rest.find("::") {
            let begin = start_of_name(&rest[..colons]);
            let item = &rest[colons + "::".len()..];
            let (item, after) = item.split_at(item.find(|c| !is_of_name(c)).unwrap_or(item.len()));
            // A longer path is no name of this crate.
            let is_part = after.starts_with("::") || words.ends_with("::");
            let before = &rest[..begin];
            match self.name(&rest[begin..colons], item).filter(|_| !is_part) {
                Some(name) => rest = self.put(&mut words, before, name, after),
                None => {
                    words.push_str(&rest[..rest.len() - after.len()]);
                    rest = after;
                }
            }
        }
        words + rest
    }

    /// Appends what stands before a name, and the name, which may be the value of an option. Returns what comes after.
    fn put<'s>(self, words: &mut String, before: &str, name: String, after: &'s str) -> &'s str {
        if let Some(open) = before.strip_suffix('(')
            && let Some(after) = after.strip_prefix(')')
            && let begin = start_of_name(open)
            && let Some(option) = self.of_table(&OPTIONS, &open[begin..])
        {
            words.extend([&open[..begin], &option.replace("{}", &name)]);
            return after;
        }
        words.extend([before, &name]);
        after
    }

    /// What the item of a type is called.
    fn name(self, of: &str, item: &str) -> Option<String> {
        if let Some(name) = self.of_table(&ITEMS, &format!("{of}::{item}")) {
            return Some(name.into());
        }
        let name = self.of_table(&TYPES, of)?.replace("{}", item);
        let name = name.replace("{a}", &item.to_lowercase());
        Some(name.replace("{A}", &item.to_uppercase()))
    }

    fn of_table(self, names: &[[&'static str; 3]], id: &str) -> Option<&'static str> {
        let names = names.iter().find(|names| names[0] == id)?;
        Some(names[self as usize + 1])
    }
}

/// Where the name begins that ends `text`.
fn start_of_name(text: &str) -> usize {
    text.rfind(|c| !is_of_name(c))
        .map_or(0, |before| before + 1)
}

fn is_of_name(c: char) -> bool {
    c.is_ascii_alphanumeric() || c == '_'
}
