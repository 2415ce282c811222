//! Where the elements of a matrix lie, and whether two matrices have a byte in common.

/// The bytes that are elements of a matrix.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Place {
    /// The address of the first element.
    pub address: u64,
    /// The number of rows.
    pub rows: usize,
    /// Bytes of a row that are elements.
    pub width: usize,
    /// Bytes from row to row.
    pub pitch: usize,
}

impl Place {
    /// True if a byte is an element of both. What lies between the rows belongs to neither, so columns of one larger
    /// matrix do not overlap.
    #[inline]
    pub fn overlaps(&self, other: &Place) -> bool {
        self.address < other.end()
            && other.address < self.end()
            && !self.is_empty()
            && !other.is_empty()
            && self.has_common_byte(other)
    }

    /// True if each element of one is that of the other in the same row and column. Both are of one type.
    pub fn is(&self, other: &Place) -> bool {
        let alike = self.rows <= 1 || self.pitch == other.pitch;
        let [own, its] = [self, other].map(|of| (of.address, of.rows, of.width));
        own == its && alike
    }

    fn is_empty(&self) -> bool {
        self.rows == 0 || self.width == 0
    }

    /// The address after the last element. (A matrix that has been checked ends within the address space.)
    #[inline]
    pub fn end(&self) -> u64 {
        let before = self.rows.saturating_sub(1).saturating_mul(self.pitch);
        let bytes = before.saturating_add(self.width);
        self.address.saturating_add(bytes as u64)
    }

    /// [`Place::overlaps`], of matrices with rows.
    ///
    /// Rows of one pitch need one comparison. Otherwise each row of the matrix with fewer rows needs one, which takes
    /// less time than a call takes to read the row.
    #[cold]
    fn has_common_byte(&self, other: &Place) -> bool {
        let [own, its] = [self, other].map(WideRows::of);
        let (few, many) = if own.rows <= its.rows {
            (own, its)
        } else {
            (its, own)
        };
        if few.rows > 1 && few.pitch == many.pitch {
            // Row i of one meets row j of the other if row 0 meets row j - i. So the other gets rows with the numbers
            // from -(rows - 1) on.
            let before = few.rows - 1;
            let all = WideRows {
                first: many.first - before * many.pitch,
                rows: before + many.rows,
                ..many
            };
            return all.has_any_of(few.first, few.width);
        }
        (0..few.rows).any(|row| many.has_any_of(few.first + row * few.pitch, few.width))
    }
}

/// A [`Place`] in numbers that are wide enough for all sums.
#[derive(Clone, Copy)]
struct WideRows {
    first: i128,
    rows: i128,
    width: i128,
    pitch: i128,
}

impl WideRows {
    fn of(place: &Place) -> WideRows {
        let Place {
            address,
            rows,
            width,
            pitch,
        } = *place;
        let [rows, width, pitch] = [rows, width, pitch].map(|number| number as i128);
        // Rows that follow one another are one row.
        let (rows, width) = if pitch <= width {
            (1, (rows - 1) * pitch + width)
        } else {
            (rows, width)
        };
        WideRows {
            first: i128::from(address),
            rows,
            width,
            pitch,
        }
    }

    /// True if a row has one of `width` bytes from `first` on.
    fn has_any_of(&self, first: i128, width: i128) -> bool {
        let before = first - self.first;
        // The first row that ends after the first byte.
        let row = match self.rows {
            1 => 0,
            _ => ((before - self.width).div_euclid(self.pitch) + 1).max(0),
        };
        let begin = row * self.pitch;
        row < self.rows && begin < before + width && before < begin + self.width
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use proptest::prelude::*;

    use super::Place;

    fn place(address: u64, rows: usize, width: usize, pitch: usize) -> Place {
        Place {
            address,
            rows,
            width,
            pitch,
        }
    }

    fn bytes(of: &Place) -> HashSet<u64> {
        let first = |row: usize| of.address + (row * of.pitch) as u64;
        let rows = (0..of.rows).map(|row| first(row)..first(row) + of.width as u64);
        rows.flatten().collect()
    }

    fn any_place() -> impl Strategy<Value = Place> {
        let gap = prop_oneof![Just(0), 0..24usize];
        (0..96u64, 0..7usize, 0..20usize, gap)
            .prop_map(|(address, rows, width, gap)| place(address, rows, width, width + gap))
    }

    /// Two places, often of one pitch.
    fn two_places() -> impl Strategy<Value = (Place, Place)> {
        (any_place(), any_place(), any::<bool>()).prop_map(|(one, other, alike)| {
            let pitch = one.pitch.max(other.pitch);
            let of = |place: Place| Place { pitch, ..place };
            if alike {
                (of(one), of(other))
            } else {
                (one, other)
            }
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 20 } else { 20_000 }))]

        #[test]
        fn places_overlap_if_they_have_a_byte_in_common((one, other) in two_places()) {
            let expected = !bytes(&one).is_disjoint(&bytes(&other));
            prop_assert_eq!(one.overlaps(&other), expected);
            prop_assert_eq!(other.overlaps(&one), expected);
        }

        #[test]
        fn no_number_is_too_large(one in extreme_place(), other in extreme_place()) {
            prop_assert_eq!(one.overlaps(&other), other.overlaps(&one));
        }
    }

    fn extreme_place() -> impl Strategy<Value = Place> {
        let number = || {
            const CHOSEN: [usize; 6] = [0, 1, 1 << 31, 1 << 32, 1 << 63, usize::MAX];
            prop_oneof![prop::sample::select(&CHOSEN[..]), any::<usize>()]
        };
        let all = (number(), 0..64usize, number(), number());
        all.prop_map(|(address, rows, width, pitch)| place(address as u64, rows, width, pitch))
    }

    #[test]
    fn columns_of_one_matrix_do_not_overlap() {
        let (rows, pitch) = (1 << 20, 3 * 8192);
        let [q, k, v] = [0, 1, 2].map(|part| place(4096 + part * 8192, rows, 8192, pitch));
        assert!(!q.overlaps(&k) && !k.overlaps(&v) && !v.overlaps(&q));
        let wide = place(4096 + 8190, rows, 4, pitch);
        assert!(wide.overlaps(&q) && wide.overlaps(&k) && !wide.overlaps(&v));
        // The same columns of other rows.
        let next = place(4096 + (rows * pitch) as u64, rows, 8192, pitch);
        assert!(!q.overlaps(&next));
        // Every second row, of which the other matrix has different columns.
        let second = place(4096 + 8192, rows / 2, 8192, 2 * pitch);
        assert!(!second.overlaps(&q) && second.overlaps(&k));
    }

    #[test]
    fn a_matrix_is_itself_whatever_the_pitch_of_its_only_row() {
        let row = place(4096, 1, 64, 64);
        assert!(row.is(&place(4096, 1, 64, 128)) && row.overlaps(&row));
        let rows = place(4096, 2, 64, 64);
        assert!(rows.is(&rows) && !rows.is(&place(4096, 2, 64, 128)));
        assert!(!rows.is(&place(4096, 3, 64, 64)) && !rows.is(&place(4097, 2, 64, 64)));
    }
}
