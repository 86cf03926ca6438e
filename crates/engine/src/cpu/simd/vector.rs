//! Norms, rotary embedding, activations, quantization of rows and attention, eight lanes at a time.
//!
//! Each operation is written once over [`Lanes`] and compiled for each instruction set; sums run
//! in eight lanes that are folded in one fixed order.

use half::f16;

use crate::cpu::simd::Isa;

/// Eight f32. Comparisons with NaN follow `vmaxps`: the second operand is taken.
trait Lanes: Copy {
    fn splat(x: f32) -> Self;
    fn load(x: &[f32]) -> Self;
    fn load_f16(x: &[u16]) -> Self;
    fn store(self, out: &mut [f32]);
    fn store_f16(self, out: &mut [u16]);
    /// Rounded integers within i16.
    fn store_i16(self, out: &mut [i16]);
    fn add(self, b: Self) -> Self;
    fn mul(self, b: Self) -> Self;
    fn div(self, b: Self) -> Self;
    /// `self * b + c`, rounded once.
    fn mul_add(self, b: Self, c: Self) -> Self;
    fn max(self, b: Self) -> Self;
    fn min(self, b: Self) -> Self;
    fn abs(self) -> Self;
    /// To the nearest integer, ties to even.
    fn round(self) -> Self;
    /// 2 to a whole number within -126…127.
    fn exp2_whole(self) -> Self;
    fn to_array(self) -> [f32; 8];

    #[inline(always)]
    fn sum(self) -> f32 {
        let x = self.to_array();
        ((x[0] + x[4]) + (x[2] + x[6])) + ((x[1] + x[5]) + (x[3] + x[7]))
    }

    #[inline(always)]
    fn largest(self) -> f32 {
        self.to_array().into_iter().fold(f32::NEG_INFINITY, f32::max)
    }
}

#[derive(Clone, Copy)]
struct Plain([f32; 8]);

impl Plain {
    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        Self(std::array::from_fn(|i| f(self.0[i], b.0[i])))
    }
}

impl Lanes for Plain {
    #[inline(always)]
    fn splat(x: f32) -> Self {
        Self([x; 8])
    }
    #[inline(always)]
    fn load(x: &[f32]) -> Self {
        Self(x[..8].try_into().expect("eight"))
    }
    #[inline(always)]
    fn load_f16(x: &[u16]) -> Self {
        Self(std::array::from_fn(|i| f16::from_bits(x[i]).to_f32()))
    }
    #[inline(always)]
    fn store(self, out: &mut [f32]) {
        out[..8].copy_from_slice(&self.0);
    }
    #[inline(always)]
    fn store_f16(self, out: &mut [u16]) {
        for (out, x) in out[..8].iter_mut().zip(self.0) {
            *out = f16::from_f32(x).to_bits();
        }
    }
    #[inline(always)]
    fn store_i16(self, out: &mut [i16]) {
        for (out, x) in out[..8].iter_mut().zip(self.0) {
            *out = x.round_ties_even() as i16;
        }
    }
    #[inline(always)]
    fn add(self, b: Self) -> Self {
        self.zip(b, |a, b| a + b)
    }
    #[inline(always)]
    fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, b: Self) -> Self {
        self.zip(b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }
    #[inline(always)]
    fn max(self, b: Self) -> Self {
        self.zip(b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, b: Self) -> Self {
        self.zip(b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn abs(self) -> Self {
        Self(self.0.map(f32::abs))
    }
    #[inline(always)]
    fn round(self) -> Self {
        Self(self.0.map(f32::round_ties_even))
    }
    #[inline(always)]
    fn exp2_whole(self) -> Self {
        Self(self.0.map(|x| f32::from_bits(((x as i32 + 127) << 23) as u32)))
    }
    #[inline(always)]
    fn to_array(self) -> [f32; 8] {
        self.0
    }
}

#[cfg(target_arch = "x86_64")]
mod avx2 {
    use std::arch::x86_64::*;

    use super::Lanes;

    /// Made only inside functions that have AVX2, FMA and F16C enabled.
    #[derive(Clone, Copy)]
    pub(super) struct Avx2(__m256);

    // SAFETY of every block below: the features are there by the type's rule, and the slice
    // indexing before a pointer is formed proves that eight elements are.
    impl Lanes for Avx2 {
        #[inline(always)]
        fn splat(x: f32) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_set1_ps(x) })
        }
        #[inline(always)]
        fn load(x: &[f32]) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_loadu_ps(x[..8].as_ptr()) })
        }
        #[inline(always)]
        fn load_f16(x: &[u16]) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_cvtph_ps(_mm_loadu_si128(x[..8].as_ptr().cast())) })
        }
        #[inline(always)]
        fn store(self, out: &mut [f32]) {
            // SAFETY: see above.
            unsafe { _mm256_storeu_ps(out[..8].as_mut_ptr(), self.0) }
        }
        #[inline(always)]
        fn store_f16(self, out: &mut [u16]) {
            // SAFETY: see above.
            unsafe {
                _mm_storeu_si128(out[..8].as_mut_ptr().cast(), _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(self.0))
            }
        }
        #[inline(always)]
        fn store_i16(self, out: &mut [i16]) {
            // SAFETY: see above.
            unsafe {
                let whole = _mm256_cvtps_epi32(self.0);
                let packed = _mm_packs_epi32(_mm256_castsi256_si128(whole), _mm256_extracti128_si256::<1>(whole));
                _mm_storeu_si128(out[..8].as_mut_ptr().cast(), packed);
            }
        }
        #[inline(always)]
        fn add(self, b: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_add_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn mul(self, b: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_mul_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn div(self, b: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_div_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn mul_add(self, b: Self, c: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_fmadd_ps(self.0, b.0, c.0) })
        }
        #[inline(always)]
        fn max(self, b: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_max_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn min(self, b: Self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_min_ps(self.0, b.0) })
        }
        #[inline(always)]
        fn abs(self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_andnot_ps(_mm256_set1_ps(-0.0), self.0) })
        }
        #[inline(always)]
        fn round(self) -> Self {
            // SAFETY: see above.
            Self(unsafe { _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0) })
        }
        #[inline(always)]
        fn exp2_whole(self) -> Self {
            // SAFETY: see above.
            Self(unsafe {
                let biased = _mm256_add_epi32(_mm256_cvtps_epi32(self.0), _mm256_set1_epi32(127));
                _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
            })
        }
        #[inline(always)]
        fn to_array(self) -> [f32; 8] {
            let mut out = [0.0; 8];
            self.store(&mut out);
            out
        }
    }
}

/// Defines `pub(crate) fn name(isa, args)` that runs `generic::<V>` for the instruction set.
macro_rules! dispatch {
    ($(#[$doc:meta])* $name:ident = $generic:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)?) => {
        $(#[$doc])*
        pub(crate) fn $name(isa: Isa, $($arg: $ty),*) $(-> $ret)? {
            #[cfg(target_arch = "x86_64")]
            #[target_feature(enable = "avx2,fma,f16c")]
            fn avx2($($arg: $ty),*) $(-> $ret)? {
                $generic::<avx2::Avx2>($($arg),*)
            }
            match isa {
                Isa::Plain => $generic::<Plain>($($arg),*),
                #[cfg(target_arch = "x86_64")]
                // SAFETY: `Isa` names these only where the processor has AVX2, FMA and F16C.
                Isa::Avx2 | Isa::Vnni => unsafe { avx2($($arg),*) },
            }
        }
    };
}

dispatch! {
    /// `y[h] = x[h] / sqrt(mean of squares + eps) * weight[h]`; gives the sum of squares, which is
    /// not finite when an element is not. Zhang and Sennrich, Root Mean Square Layer
    /// Normalization, 2019, eq. 4.
    rms_norm = rms_norm_generic(y: &mut [f32], x: &[f32], weight: &[f32], eps: f32) -> f32
}
dispatch! {
    /// The same within `x`.
    rms_norm_in_place = rms_norm_in_place_generic(x: &mut [f32], weight: &[f32], eps: f32)
}
dispatch! {
    /// `x += y`.
    add = add_generic(x: &mut [f32], y: &[f32])
}
dispatch! {
    /// Quantizes a row to 16 bits: gives its scale, NaN when an element is not finite;
    /// `sums[b]` is the sum of the integers of 32 columns.
    quantize = quantize_generic(quants: &mut [i16], sums: &mut [f32], x: &[f32]) -> f32
}
dispatch! {
    /// Rotates a head: pairs are `(x[i], x[i + half])`. Su et al., RoFormer, 2021, eq. 34.
    rope = rope_generic(x: &mut [f32], cos: &[f32], sin: &[f32])
}
dispatch! {
    /// `gate = gelu(gate) * up` with the tanh form. Hendrycks and Gimpel, Gaussian Error Linear
    /// Units, 2016, section 2.
    gelu_mul = gelu_mul_generic(gate: &mut [f32], up: &[f32])
}
dispatch! {
    /// `gate = gate * sigmoid(gate) * up`.
    silu_mul = silu_mul_generic(gate: &mut [f32], up: &[f32])
}
dispatch! {
    /// Rounds a row to f16.
    to_f16 = to_f16_generic(out: &mut [u16], x: &[f32])
}
dispatch! {
    /// Attention of one token over cached rows: `q`, `out` `[heads, dim]`; `scores` is scratch.
    /// Vaswani et al., Attention Is All You Need, 2017, eq. 1, with the greatest score taken off.
    attend = attend_generic(out: &mut [f32], q: &[f32], k: Cached<'_>, v: Cached<'_>, head: Head<'_>, scores: &mut Vec<f32>)
}

/// Rows of the KV cache.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Cached<'a> {
    F32(&'a [f32]),
    /// f16 bits.
    F16(&'a [u16]),
}

#[inline(always)]
fn sum_of_squares<V: Lanes>(x: &[f32]) -> f32 {
    let mut sum = V::splat(0.0);
    for x in x.chunks_exact(8) {
        let x = V::load(x);
        sum = x.mul_add(x, sum);
    }
    sum.sum()
}

#[inline(always)]
fn rms_norm_generic<V: Lanes>(y: &mut [f32], x: &[f32], weight: &[f32], eps: f32) -> f32 {
    let squares = sum_of_squares::<V>(x);
    let scale = V::splat(1.0 / (squares / x.len() as f32 + eps).sqrt());
    for ((y, x), w) in y.chunks_exact_mut(8).zip(x.chunks_exact(8)).zip(weight.chunks_exact(8)) {
        V::load(x).mul(scale).mul(V::load(w)).store(y);
    }
    squares
}

#[inline(always)]
fn rms_norm_in_place_generic<V: Lanes>(x: &mut [f32], weight: &[f32], eps: f32) {
    let scale = V::splat(1.0 / (sum_of_squares::<V>(x) / x.len() as f32 + eps).sqrt());
    for (x, w) in x.chunks_exact_mut(8).zip(weight.chunks_exact(8)) {
        V::load(x).mul(scale).mul(V::load(w)).store(x);
    }
}

#[inline(always)]
fn add_generic<V: Lanes>(x: &mut [f32], y: &[f32]) {
    for (x, y) in x.chunks_exact_mut(8).zip(y.chunks_exact(8)) {
        V::load(x).add(V::load(y)).store(x);
    }
}

#[inline(always)]
fn quantize_generic<V: Lanes>(quants: &mut [i16], sums: &mut [f32], x: &[f32]) -> f32 {
    let (mut largest, mut poison) = (V::splat(0.0), V::splat(0.0));
    for x in x.chunks_exact(8) {
        let x = V::load(x);
        largest = largest.max(x.abs());
        // 0 × NaN and 0 × inf are NaN, which a maximum would lose.
        poison = x.mul_add(V::splat(0.0), poison);
    }
    let largest = largest.largest();
    let inverse = V::splat(if largest > 0.0 { 32767.0 / largest } else { 0.0 });
    for ((quants, x), out) in quants.chunks_exact_mut(32).zip(x.chunks_exact(32)).zip(sums.iter_mut()) {
        let mut sum = V::splat(0.0);
        for (quants, x) in quants.chunks_exact_mut(8).zip(x.chunks_exact(8)) {
            let whole = V::load(x).mul(inverse).round();
            sum = sum.add(whole);
            whole.store_i16(quants);
        }
        *out = sum.sum();
    }
    largest / 32767.0 + poison.sum()
}

#[inline(always)]
fn rope_generic<V: Lanes>(x: &mut [f32], cos: &[f32], sin: &[f32]) {
    let (first, second) = x.split_at_mut(cos.len());
    for (((a, b), c), s) in
        first.chunks_exact_mut(8).zip(second.chunks_exact_mut(8)).zip(cos.chunks_exact(8)).zip(sin.chunks_exact(8))
    {
        let (x, y, c, s) = (V::load(a), V::load(b), V::load(c), V::load(s));
        x.mul(c).add(y.mul(s).mul(V::splat(-1.0))).store(a);
        y.mul(c).add(x.mul(s)).store(b);
    }
}

/// Cephes `expf` (Moshier, 1984): range reduction by ln 2 in two parts and a polynomial of degree 7.
#[inline(always)]
fn exp<V: Lanes>(x: V) -> V {
    let x = V::splat(88.0).min(V::splat(-87.0).max(x));
    let n = x.mul(V::splat(std::f32::consts::LOG2_E)).round();
    let r = n.mul_add(V::splat(-0.693_359_4), x);
    let r = n.mul_add(V::splat(2.121_944_4e-4), r);
    let mut p = V::splat(1.987_569_1e-4);
    for c in [1.398_2e-3, 8.333_452e-3, 4.166_579_6e-2, 1.666_666_5e-1, 0.5] {
        p = p.mul_add(r, V::splat(c));
    }
    let p = p.mul_add(r.mul(r), r).add(V::splat(1.0));
    p.mul(n.exp2_whole())
}

/// `x * sigmoid(z)`.
#[inline(always)]
fn times_sigmoid<V: Lanes>(x: V, z: V) -> V {
    x.div(V::splat(1.0).add(exp(z.mul(V::splat(-1.0)))))
}

#[inline(always)]
fn gelu_mul_generic<V: Lanes>(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.chunks_exact_mut(8).zip(up.chunks_exact(8)) {
        let x = V::load(gate);
        // 0.5 x (1 + tanh(u)) = x sigmoid(2u) with u = sqrt(2/pi) (x + 0.044715 x³).
        let cubic = x.mul(x).mul_add(V::splat(0.044_715), V::splat(1.0)).mul(x);
        times_sigmoid(x, cubic.mul(V::splat(2.0 * 0.797_884_6))).mul(V::load(up)).store(gate);
    }
}

#[inline(always)]
fn silu_mul_generic<V: Lanes>(gate: &mut [f32], up: &[f32]) {
    for (gate, up) in gate.chunks_exact_mut(8).zip(up.chunks_exact(8)) {
        let x = V::load(gate);
        times_sigmoid(x, x).mul(V::load(up)).store(gate);
    }
}

#[inline(always)]
fn to_f16_generic<V: Lanes>(out: &mut [u16], x: &[f32]) {
    for (out, x) in out.chunks_exact_mut(8).zip(x.chunks_exact(8)) {
        V::load(x).store_f16(out);
    }
}

#[inline(always)]
fn attend_generic<V: Lanes>(
    out: &mut [f32],
    q: &[f32],
    k: Cached<'_>,
    v: Cached<'_>,
    head: Head<'_>,
    scores: &mut Vec<f32>,
) {
    let dim = head.dim;
    let heads = q.len() / dim;
    let mut at = 0;
    while at < heads {
        let n = if heads - at >= 4 { 4 } else { heads - at };
        let (q, out) = (&q[at * dim..(at + n) * dim], &mut out[at * dim..(at + n) * dim]);
        match (k, v) {
            (Cached::F32(k), Cached::F32(v)) => heads_of::<V, f32>(out, q, k, v, head, n, scores),
            (Cached::F16(k), Cached::F16(v)) => heads_of::<V, u16>(out, q, k, v, head, n, scores),
            _ => unreachable!("K and V have one type"),
        }
        at += n;
    }
}

/// What the heads of a token share.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Head<'a> {
    /// Where the row of each visible position starts in K and V.
    pub(crate) offsets: &'a [usize],
    pub(crate) dim: usize,
    /// Factor of the scores.
    pub(crate) scale: f32,
}

trait Element: Copy {
    fn load<V: Lanes>(x: &[Self]) -> V;
}

impl Element for f32 {
    #[inline(always)]
    fn load<V: Lanes>(x: &[Self]) -> V {
        V::load(x)
    }
}

impl Element for u16 {
    #[inline(always)]
    fn load<V: Lanes>(x: &[Self]) -> V {
        V::load_f16(x)
    }
}

#[inline(always)]
fn heads_of<V: Lanes, E: Element>(
    out: &mut [f32],
    q: &[f32],
    k: &[E],
    v: &[E],
    head: Head<'_>,
    heads: usize,
    scores: &mut Vec<f32>,
) {
    match heads {
        1 => attend_heads::<V, E, 1>(out, q, k, v, head, scores),
        2 => attend_heads::<V, E, 2>(out, q, k, v, head, scores),
        3 => attend_heads::<V, E, 3>(out, q, k, v, head, scores),
        _ => attend_heads::<V, E, 4>(out, q, k, v, head, scores),
    }
}

/// `H` heads that share K and V; each head's arithmetic is the same for every `H`.
#[inline(always)]
fn attend_heads<V: Lanes, E: Element, const H: usize>(
    out: &mut [f32],
    q: &[f32],
    k: &[E],
    v: &[E],
    head: Head<'_>,
    scores: &mut Vec<f32>,
) {
    let Head { offsets, dim, scale } = head;
    let stride = offsets.len().next_multiple_of(8);
    scores.clear();
    scores.resize(H * stride, f32::NEG_INFINITY);
    for (position, &offset) in offsets.iter().enumerate() {
        let k = &k[offset..offset + dim];
        let mut sums = [[V::splat(0.0); 2]; H];
        for (d, k) in k.chunks_exact(16).enumerate() {
            let (low, high) = (E::load::<V>(&k[..8]), E::load::<V>(&k[8..]));
            for (h, sums) in sums.iter_mut().enumerate() {
                let q = &q[h * dim + d * 16..][..16];
                sums[0] = V::load(&q[..8]).mul_add(low, sums[0]);
                sums[1] = V::load(&q[8..]).mul_add(high, sums[1]);
            }
        }
        for (h, sums) in sums.iter().enumerate() {
            scores[h * stride + position] = sums[0].add(sums[1]).sum() * scale;
        }
    }
    let mut inverse = [0f32; H];
    for (h, inverse) in inverse.iter_mut().enumerate() {
        *inverse = 1.0 / softmax_numerators::<V>(&mut scores[h * stride..(h + 1) * stride]);
    }
    for d in (0..dim).step_by(16) {
        let mut sums = [[V::splat(0.0); 2]; H];
        for (position, &offset) in offsets.iter().enumerate() {
            let v = &v[offset + d..offset + d + 16];
            let (low, high) = (E::load::<V>(&v[..8]), E::load::<V>(&v[8..]));
            for (h, sums) in sums.iter_mut().enumerate() {
                let weight = V::splat(scores[h * stride + position]);
                sums[0] = weight.mul_add(low, sums[0]);
                sums[1] = weight.mul_add(high, sums[1]);
            }
        }
        for (h, sums) in sums.iter().enumerate() {
            let inverse = V::splat(inverse[h]);
            sums[0].mul(inverse).store(&mut out[h * dim + d..]);
            sums[1].mul(inverse).store(&mut out[h * dim + d + 8..]);
        }
    }
}

/// Turns scores into `exp(score - greatest)`; gives their sum. Padding must be -inf.
#[inline(always)]
fn softmax_numerators<V: Lanes>(scores: &mut [f32]) -> f32 {
    let mut greatest = V::splat(f32::NEG_INFINITY);
    for scores in scores.chunks_exact(8) {
        greatest = greatest.max(V::load(scores));
    }
    let negative = V::splat(-greatest.largest());
    let mut sum = V::splat(0.0);
    for scores in scores.chunks_exact_mut(8) {
        // Padding becomes about 1e-38, which no sum of at least 1 notices.
        let weights = exp(V::load(scores).add(negative));
        sum = sum.add(weights);
        weights.store(scores);
    }
    sum.sum()
}
