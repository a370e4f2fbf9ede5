// Decoder layers for a few tokens, float32. Built by mtp/kernel.py for the machine that it runs on.
//
// With few tokens a layer costs what reading its weights costs. So every weight is read once, in order and for all
// tokens, each thread its own rows, and a weight that needs two bytes has two. A number is summed in the same order however many tokens run beside it: what a
// token gets does not depend, by a single bit, on how many are scored with it.
//
// Every function below that is not of a single number, vector or block is called by all threads of a parallel region: each
// does its share of the work, and they wait for each other where `meet` says so.
//
// Shapes: B texts, W tokens of each, M = B * W, H hidden size, Q query and K key heads of size D, I inner size,
// S slots. Matrices are row by row, outputs first.
#include <cmath>
#include <cstdint>
#include <cstdlib>
#include <utility>
#ifdef __AVX2__
#include <immintrin.h>
#endif
extern "C" int omp_get_thread_num(), omp_get_num_threads(), omp_get_max_threads();

#ifdef __AVX512F__
constexpr int V = 16, SHARING = 8, SUMS = 28;  // numbers in a register; tokens that share one load of a weight;
constexpr int AHEAD = 2;                       // sums that are kept in registers; blocks of rows that are fetched ahead
#else                                          // where so many tokens give time for it
constexpr int V = 8, SHARING = 4, SUMS = 8, AHEAD = 1;
#endif
constexpr int ROWS = 4;   // outputs computed side by side
constexpr int SLOTS = 4;  // keys that share one load of a query
constexpr int MOST = 128;  // queries of a text that are attended together
constexpr int64_t UNIT = 16;  // outputs that one thread computes, or the unit's tiles hold
constexpr int64_t FEW = 8;    // tokens that every thread prepares for itself

typedef float vec __attribute__((vector_size(4 * V), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * V), aligned(4)));
typedef int8_t byte;  // a whole number that its row's scale makes a weight
typedef byte bytes __attribute__((vector_size(V), aligned(1)));

// The upper half of a float
struct bfloat {
    uint16_t bits;
    operator float() const {
        const uint32_t whole = (uint32_t)bits << 16;
        float number;
        __builtin_memcpy(&number, &whole, sizeof number);
        return number;
    }
};
typedef uint16_t shorts __attribute__((vector_size(2 * V), aligned(2)));

static inline vec load(const float* p) { return *(const vec*)p; }
#ifdef __AVX512F__  // compilers take the general way apart
static inline vec load(const byte* p) { return (vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p))); }
static inline vec load(const bfloat* p) { return (vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16); }
#elif defined(__AVX2__)
static inline vec load(const byte* p) { return (vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p))); }
static inline vec load(const bfloat* p) { return (vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16); }
#else
static inline vec load(const byte* p) { return __builtin_convertvector(__builtin_convertvector(*(const bytes*)p, ints), vec); }
static inline vec load(const bfloat* p) { return (vec)(__builtin_convertvector(*(const shorts*)p, ints) << 16); }
#endif
static inline void store(float* p, vec x) { *(vec*)p = x; }
static inline vec all(float x) { return x - vec{}; }

// lanes[i ^ H] at i
template <int H, int... I>
static inline vec exchange(vec x, std::integer_sequence<int, I...>) {
#ifdef __clang__
    return __builtin_shufflevector(x, x, (I ^ H)...);
#else
    return __builtin_shuffle(x, ints{(I ^ H)...});
#endif
}

// Where bit H of i is set y[i] + y[i ^ H], elsewhere x[i] + x[i ^ H]: half of two registers' sums in one register.
template <int H, int... I>
static inline vec halved(vec x, vec y, std::integer_sequence<int, I...> lanes) {
    const ints second = {(I & H ? -1 : 0)...};
    return (second ? y : x) + exchange<H>(second ? x : y, lanes);
}

// The sums of N <= V registers (a power of two); that of register j stands in lane j * V / N. A register's numbers
// are added by halves, in the same order whatever N is.
template <int N, int H = V / 2>
static inline vec sums(const vec* x) {
    constexpr auto lanes = std::make_integer_sequence<int, V>();
    constexpr int HALF = N > 1 ? N / 2 : 1;
    vec y[HALF];
    for (int j = 0; j < HALF; j++) y[j] = halved<H>(x[j], x[N > 1 ? j + HALF : j], lanes);
    if constexpr (H > 1)
        return sums<HALF, H / 2>(y);
    else
        return y[0];
}

// The sum of all numbers in a register.
static inline float sum(vec x) { return sums<1>(&x)[0]; }

// e^x to float32 rounding, 0 below -87: e^x = 2^n e^r, |r| <= ln 2 / 2, e^r by its Taylor series.
static inline vec exponential(vec x) {
    const vec top = all(88.0f);
    vec y = x > top ? top : x;
    vec shifted = y * 1.44269504f + 12582912.0f;  // adding 1.5 * 2^23 rounds to a whole number
    vec n = shifted - 12582912.0f;
    vec r = y - n * 0.693145752f - n * 1.42860677e-6f;
    vec e = all(1.0f / 5040);
    const float taylor[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (float factor : taylor) e = e * r + factor;
    ints power = ((ints)shifted - 0x4B400000 + 127) << 23;
    return x < all(-87.0f) ? vec{} : e * (vec)power;
}

// What a thread does of `count` things: the same of as many, so that it finds again what it has made.
struct Share {
    int64_t first, last;
    explicit Share(int64_t count, int64_t unit = 1) {
        const int64_t units = (count + unit - 1) / unit, threads = omp_get_num_threads(), thread = omp_get_thread_num();
        first = units * thread / threads * unit;
        last = units * (thread + 1) / threads * unit;
        if (last > count) last = count;
    }
};

template <class Number>
struct Memory {
    Number* numbers;
    explicit Memory(int64_t count) : numbers((Number*)malloc(count * sizeof(Number))) {}
    Memory(const Memory&) = delete;
    ~Memory() { free(numbers); }
};

// Threads wait for each other.
static inline void meet() {
#pragma omp barrier
}

// A matrix row by row.
template <class Number>
struct Rows {
    static constexpr int TOKENS = SHARING;
    const Number* weight;  // [outputs, inputs]
    const float* scale;    // [outputs], of bytes
    const float* bias;     // [outputs] or null
    int64_t outputs, inputs;
};

// How weights lie: bytes only where they draft, bfloat where no weight loses anything by it, both as tiles for a matrix unit,
// floats as tiles where no one else reads them row by row.
enum Kind : int64_t { FLOATS, BYTES, BFLOATS, TILES, BYTE_TILES, FLOAT_TILES };

struct Matrix {
    const void* weight;
    const float *scale, *bias;
    int64_t outputs, inputs;
    Kind kind;
    template <class Number>
    Rows<Number> rows() const { return {(const Number*)weight, scale, bias, outputs, inputs}; }
    // `count` of the outputs, from the first on; of tiles whole ones
    Matrix part(int64_t first, int64_t count) const {
        const int64_t size = kind == FLOATS || kind == FLOAT_TILES ? 4 : kind == BYTES || kind == BYTE_TILES ? 1 : 2;
        return {(const char*)weight + first * inputs * size, scale ? scale + first : nullptr, bias ? bias + first : nullptr,
                count, inputs, kind};
    }
};

constexpr int power_of_two(int n) { return n <= 1 ? 1 : 2 * power_of_two((n + 1) / 2); }  // n, rounded up to one

// y[m, r] = x[m] . weight[r] + bias[r] + add[m, r] for M tokens and R rows from `row` on.
template <int M, int R, bool FIRST, class Number>
static inline void dots(const Rows<Number>& a, const float* x, const float* add, float* y, int64_t row) {
    const int64_t n = a.inputs;
    const Number* w = a.weight + row * n;
    constexpr int TOGETHER = power_of_two(M * R < V ? M * R : V), STEP = V / TOGETHER;
    constexpr int ROUND = (M * R + TOGETHER - 1) / TOGETHER * TOGETHER;
    // Blocks to fetch ahead: rows are too short for the processor to foresee, those of bytes shorter still.
    constexpr bool SHORT = sizeof(Number) == sizeof(byte), HALF = sizeof(Number) == sizeof(bfloat);
    constexpr bool BUSY = HALF ? M > 1 : M == SHARING;
    constexpr int BLOCKS = SHORT ? 4 : BUSY ? AHEAD : 1, LEVEL = !SHORT && BLOCKS > 1 ? 2 : 3;
    constexpr int64_t LINE = SHORT || HALF ? 64 / sizeof(Number) : V;
    vec parts[ROUND] = {};
    int64_t i = 0;
    for (; i + V <= n; i += V) {
        vec part[R];
        for (int r = 0; r < R; r++) {
            part[r] = load(w + r * n + i);
            if (FIRST && i % LINE == 0) __builtin_prefetch(w + (BLOCKS * ROWS + r) * n + i, 0, LEVEL);
        }
        for (int m = 0; m < M; m++) {
            vec token = load(x + m * n + i);
            for (int r = 0; r < R; r++) parts[m * R + r] += part[r] * token;
        }
    }
    float totals[ROUND * STEP];
    for (int k = 0; k < ROUND; k += TOGETHER) store(totals + k * STEP, sums<TOGETHER>(parts + k));
    for (int m = 0; m < M; m++) {
        float* total = totals + m * R * STEP;
        for (int64_t j = i; j < n; j++)
            for (int r = 0; r < R; r++) total[r * STEP] = std::fma(x[m * n + j], (float)w[r * n + j], total[r * STEP]);
        const int64_t to = m * a.outputs + row;
        if constexpr (SHORT)
            for (int r = 0; r < R; r++) total[r * STEP] *= a.scale[row + r];
        if (a.bias)
            for (int r = 0; r < R; r++) total[r * STEP] += a.bias[row + r];
        if (add)
            for (int r = 0; r < R; r++) total[r * STEP] += add[to + r];
        for (int r = 0; r < R; r++) y[to + r] = total[r * STEP];
    }
}

template <int M, int R, bool FIRST, class Number>
static inline void block(const Rows<Number>& a, const float* x, const float* add, float* y, int64_t row) {
    if constexpr (M * R > SUMS) {
        block<M, R / 2, FIRST>(a, x, add, y, row);
        block<M, R / 2, FIRST>(a, x, add, y, row + R / 2);
    } else
        dots<M, R, FIRST>(a, x, add, y, row);
}

// `count` <= M tokens
template <int R, bool FIRST, int M, class Weights>
static inline void some(int64_t count, const Weights& a, const float* x, const float* add, float* y, int64_t row) {
    if (count == M)
        block<M, R, FIRST>(a, x, add, y, row);
    else if constexpr (M > 1)
        some<R, FIRST, M - 1>(count, a, x, add, y, row);
}

// R rows, or registers of them, for all tokens; the first tokens bring the weights in, the others find them in the cache.
template <int R, class Weights>
static inline void groups(const Weights& a, int64_t tokens, const float* x, const float* add, float* y, int64_t row) {
    constexpr int M = Weights::TOKENS;
    for (int64_t m = 0; m < tokens; m += M) {
        const int64_t count = tokens - m < M ? tokens - m : M;
        const float* plus = add ? add + m * a.outputs : nullptr;
        if (m == 0)
            some<R, true, M>(count, a, x, plus, y, row);
        else
            some<R, false, M>(count, a, x + m * a.inputs, plus, y + m * a.outputs, row);
    }
}

template <class Number>
static void multiply(const Rows<Number>& a, int64_t tokens, const float* x, const float* add, float* y) {
    const Share mine(a.outputs, UNIT);
    int64_t row = mine.first;
    for (; row + ROWS <= mine.last; row += ROWS) groups<ROWS>(a, tokens, x, add, y, row);
    for (int64_t m = 0; m < tokens; m++)
        for (int64_t r = row; r < mine.last; r++)
            dots<1, 1, false>(a, x + m * a.inputs, add ? add + m * a.outputs : nullptr, y + m * a.outputs, r);
}

#include "tiles.cpp"
#include "float_tiles.cpp"

// y [M, outputs] = x [M, inputs] weight' + bias + add. A thread makes its share of the outputs, in units.
static void multiply(const Matrix& a, int64_t tokens, const float* x, const float* add, float* y) {
    switch (a.kind) {
        case FLOATS: return multiply(a.rows<float>(), tokens, x, add, y);
        case BYTES: return multiply(a.rows<byte>(), tokens, x, add, y);
        case BFLOATS: return multiply(a.rows<bfloat>(), tokens, x, add, y);
        case TILES: return multiply_tiles<Floats>(a, tokens, x, add, y);
        case BYTE_TILES: return multiply_tiles<Bytes>(a, tokens, x, add, y);
        case FLOAT_TILES: return multiply(Lanes{(const float*)a.weight, a.bias, a.outputs, a.inputs}, tokens, x, add, y);
    }
}

// weight * x / sqrt(mean(x^2) + epsilon) of one vector
static inline void norm(const float* x, const float* weight, int64_t n, float epsilon, float* y) {
    vec squares = {};
    int64_t i = 0;
    for (; i + V <= n; i += V) squares += load(x + i) * load(x + i);
    float total = sum(squares);
    for (; i < n; i++) total = std::fma(x[i], x[i], total);
    const float scale = 1.0f / std::sqrt(total / n + epsilon);
    for (i = 0; i < n; i++) y[i] = weight[i] * (x[i] * scale);
}

// What `one(m, y)` puts into y for every token: few of them each thread prepares for itself, in memory of its own, which
// takes less time than waiting for another.
template <class One>
static const float* prepare(int64_t tokens, float* own, float* shared, One one) {
    const bool few = tokens <= FEW;
    const Share mine(tokens);
    float* y = few ? own : shared;
    for (int64_t m = few ? 0 : mine.first; m < (few ? tokens : mine.last); m++) one(m, y);
    if (!few) meet();
    return y;
}

static const float* norms(const float* x, const float* weight, int64_t tokens, int64_t n, float epsilon, float* own,
                          float* shared) {
    return prepare(tokens, own, shared, [=](int64_t m, float* y) { norm(x + m * n, weight, n, epsilon, y + m * n); });
}

struct Layer {
    Matrix qkv, out, gate_up, down;
    const float *first_norm, *second_norm, *query_norm, *key_norm;  // the last two are null but in qwen3
    int64_t hidden, inner, queries, keys, size;
    float epsilon, scale;
    const Layer* next;  // of the trunk
    int64_t numbers() const { return (queries + 2 * keys) * size; }  // of a token's queries, keys and values
};

// What a run of layers works on.
struct Run {
    int64_t layers, texts, width, slots;
    const float *x, *cosines, *sines;  // [M, H]; [B, W, D] or, where shared, [1, W, D], half of the sines negative
    int64_t angles;                    // B * W or W
    float* const* stored;              // keys and values of every layer [B, K, >= S, D] each
    int64_t text_step, head_step;      // numbers in them from one text, or head, to the next
    const int64_t* places;             // [B, W] slots of these tokens; null: from `first` on
    int64_t first;
    const uint8_t* mask;  // [B or 1, W, S]; null: causal, the last token sees all
    int64_t mask_step;    // W * S or 0
    const int64_t* ends;  // where in y a layer's output goes, by layer
    float *scratch, *y;   // y [ends, M, H]
    int64_t tokens() const { return texts * width; }
    int64_t slot(int64_t m) const { return places ? places[m] : first + m % width; }
};

// The queries of one head of one text, the slots that they look at, and where the answers go.
struct Queries {
    const float *q, *k, *v;
    float* y;
    int64_t q_step, y_step;  // numbers from one query, or answer, to the next
    int64_t count, slots, size;
    const uint8_t* mask;  // [count, slots]; null: causal, the last query sees all
    float scale;
    int64_t limit(int64_t w) const { return mask ? slots : slots - count + w + 1; }
    bool sees(int64_t w, int64_t s) const { return !mask || mask[w * slots + s]; }  // below the limit
};

// scores[w, s] = q_w . k_s * scale for N slots from s on, where the query may look
template <int N>
static inline void score(const Queries& a, int64_t w, int64_t s, float* scores) {
    const float *q = a.q + w * a.q_step, *k = a.k + s * a.size;
    vec products[N] = {};
    int64_t i = 0;
    for (; i + V <= a.size; i += V)
        for (int j = 0; j < N; j++) products[j] += load(q + i) * load(k + j * a.size + i);
    float totals[V];
    store(totals, sums<N>(products));
    if (N == V && i == a.size && !a.mask) return store(scores + s, load(totals) * a.scale);
    for (int j = 0; j < N; j++) {
        if (!a.sees(w, s + j)) continue;
        float total = totals[j * (V / N)];
        for (int64_t rest = i; rest < a.size; rest++) total = std::fma(q[rest], k[j * a.size + rest], total);
        scores[s + j] = total * a.scale;
    }
}

// All of them for the slots from `first` to `last`, of every query
static inline void score(const Queries& a, int64_t first, int64_t last, int64_t row, float* scores) {
    for (int64_t w = 0; w < a.count; w++) {
        const int64_t end = last < a.limit(w) ? last : a.limit(w);
        int64_t s = first;
        for (; s + V <= end; s += V) score<V>(a, w, s, scores + w * row);
        for (; s + SLOTS <= end; s += SLOTS) score<SLOTS>(a, w, s, scores + w * row);
        for (; s < end; s++) score<1>(a, w, s, scores + w * row);
    }
}

// e^(score - best) in place of n scores, whole registers of them; their sum
static inline float exponentials(float* scores, int64_t n) {
    vec most = all(-INFINITY), total = {};
    for (int64_t s = 0; s < n; s += V) most = load(scores + s) > most ? load(scores + s) : most;
    float best = most[0];
    for (int i = 1; i < V; i++) best = most[i] > best ? most[i] : best;
    for (int64_t s = 0; s < n; s += V) {
        vec weight = exponential(load(scores + s) - best);
        store(scores + s, weight);
        total += weight;
    }
    return sum(total);
}

// z += weight[s] v_s for the slots from `first` to `last`, for N registers of numbers of Q queries: together they
// hide each other's latency, and share what is loaded.
template <int N, int Q>
static inline void add_values(const Queries& a, int64_t w, int64_t i, int64_t first, int64_t last, int64_t row,
                              const float* scores) {
    const float *v = a.v + i, *weight = scores + w * row;
    float* z = a.y + w * a.y_step + i;
    vec total[Q][N];
    for (int q = 0; q < Q; q++)
        for (int j = 0; j < N; j++) total[q][j] = load(z + q * a.y_step + j * V);
    for (int64_t s = first; s < last; s++)
        for (int j = 0; j < N; j++) {
            const vec value = load(v + s * a.size + j * V);
            for (int q = 0; q < Q; q++) total[q][j] += weight[q * row + s] * value;
        }
    for (int q = 0; q < Q; q++)
        for (int j = 0; j < N; j++) store(z + q * a.y_step + j * V, total[q][j]);
}

// y_w += scores[w, s] v_s for Q queries from w on
template <int Q>
static inline void gather(const Queries& a, int64_t w, int64_t first, int64_t last, int64_t row, const float* scores) {
    int64_t i = 0;
    for (; i + 4 * V <= a.size; i += 4 * V) add_values<4, Q>(a, w, i, first, last, row, scores);
    for (; i + 2 * V <= a.size; i += 2 * V) add_values<2, Q>(a, w, i, first, last, row, scores);
    for (; i + V <= a.size; i += V) add_values<1, Q>(a, w, i, first, last, row, scores);
    for (; i < a.size; i++)
        for (int64_t q = w; q < w + Q; q++)
            for (int64_t s = first; s < last; s++) {
                float& z = a.y[q * a.y_step + i];
                z = std::fma(scores[q * row + s], a.v[s * a.size + i], z);
            }
}

// All of them for the slots from `first` to `last`. A weight is 0 where a query may not look, so that two may go
// through the slots of the second together.
static inline void gather(const Queries& a, int64_t first, int64_t last, int64_t row, const float* scores) {
    int64_t w = 0;
    auto end = [&](int64_t query) { return last < a.limit(query) ? last : a.limit(query); };
    for (; w + 2 <= a.count; w += 2) gather<2>(a, w, first, end(w + 1), row, scores);
    for (; w < a.count; w++) gather<1>(a, w, first, end(w), row, scores);
}

// softmax(q k) v of every query; keys and values are taken in tiles that stay in the processor's cache while all
// queries look at them. count is at most MOST.
static void attend(const Queries& a, float* scores) {
    constexpr int64_t TILE = 64;
    const int64_t row = (a.slots + V - 1) / V * V;
    float whole[MOST];
    for (int64_t i = 0; i < a.count * row; i++) scores[i] = -INFINITY;
    for (int64_t s = 0; s < a.slots; s += TILE) score(a, s, s + TILE < a.slots ? s + TILE : a.slots, row, scores);
    for (int64_t w = 0; w < a.count; w++) {
        whole[w] = exponentials(scores + w * row, row);
        for (int64_t i = 0; i < a.size; i++) a.y[w * a.y_step + i] = 0;
    }
    for (int64_t s = 0; s < a.slots; s += TILE) gather(a, s, s + TILE < a.slots ? s + TILE : a.slots, row, scores);
    for (int64_t w = 0; w < a.count; w++)
        for (int64_t i = 0; i < a.size; i++) a.y[w * a.y_step + i] /= whole[w];
}

// y = x turned by its angles; both [D] in halves
static inline void turn(const float* x, const float* cosines, const float* sines, int64_t half, float* y) {
    for (int64_t j = 0; j < half; j++) {
        const float low = x[j], high = x[j + half];
        y[j] = low * cosines[j] + high * sines[j];
        y[j + half] = high * cosines[j + half] + low * sines[j + half];
    }
}

// qkv [M, Q + 2K, D]: norms and turns the queries where they are, and the keys into their slots, values as well
static void place(const Layer& a, const Run& run, float* qkv, float* keys, float* values) {
    const int64_t heads = a.queries + 2 * a.keys, half = a.size / 2;
    const Share mine(run.tokens() * heads);
    for (int64_t i = mine.first; i < mine.last; i++) {
        const int64_t m = i / heads, head = i % heads, key = (head - a.queries) % a.keys;
        float* x = qkv + i * a.size;
        const int64_t at = m / run.width * run.text_step + key * run.head_step + run.slot(m) * a.size;
        const float *cosines = run.cosines + m % run.angles * a.size, *sines = run.sines + m % run.angles * a.size;
        const float* weight = head < a.queries ? a.query_norm : a.key_norm;
        if (head >= a.queries + a.keys) {
            for (int64_t j = 0; j < a.size; j++) values[at + j] = x[j];
            continue;
        }
        if (weight) norm(x, weight, a.size, a.epsilon, x);
        turn(x, cosines, sines, half, head < a.queries ? x : keys + at);
    }
}

static void attend_all(const Layer& a, const Run& run, const float* qkv, const float* keys, const float* values,
                       float* scores, float* seen) {
    const int64_t from = a.numbers(), to = a.queries * a.size, group = a.queries / a.keys;
    const Share mine(run.texts * a.queries);
    for (int64_t i = mine.first; i < mine.last; i++) {
        const int64_t b = i / a.queries, q = i % a.queries, at = b * run.text_step + q / group * run.head_step;
        const uint8_t* mask = run.mask ? run.mask + b * run.mask_step : nullptr;
        for (int64_t w = 0; w < run.width; w += MOST) {
            const int64_t count = run.width - w < MOST ? run.width - w : MOST, m = b * run.width + w;
            const int64_t slots = mask ? run.slots : run.slots - (run.width - w - count);
            attend({qkv + m * from + q * a.size, keys + at, values + at, seen + m * to + q * a.size, from, to, count, slots,
                    a.size, mask ? mask + w * run.slots : nullptr, a.scale},
                   scores);
        }
    }
}

// gates and ups [M, I] -> y [M, I], the share of `multiply`
static void gate(const Layer& a, int64_t tokens, const float* gates, const float* ups, float* y) {
    const Share mine(a.inner, UNIT);
    for (int64_t m = 0; m < tokens; m++) {
        const float *gate = gates + m * a.inner, *up = ups + m * a.inner;
        float* z = y + m * a.inner;
        int64_t i = mine.first;
        for (; i + V <= mine.last; i += V) {
            vec g = load(gate + i);
            store(z + i, g / (1.0f + exponential(-g)) * load(up + i));
        }
        for (; i < mine.last; i++) z[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
    }
}

// What layers of a kind work in, for M tokens: M * (2H + Q D + (Q + 2K) D + 3I) numbers.
struct Work {
    float *normed, *middle, *qkv, *seen, *gates, *ups, *product;
    Work(const Layer& a, int64_t tokens, float* scratch)
        : normed(scratch), middle(normed + tokens * a.hidden), qkv(middle + tokens * a.hidden),
          seen(qkv + tokens * a.numbers()), gates(seen + tokens * a.queries * a.size), ups(gates + tokens * a.inner),
          product(ups + tokens * a.inner) {}
};

// What a thread has for itself: room for few prepared tokens of at most `numbers` each, and scores of one head's queries.
struct Own {
    Memory<float> memory;
    float *prepared, *scores;
    Own(const Run& run, int64_t numbers)
        : memory(FEW * numbers + (run.width < MOST ? run.width : MOST) * (run.slots + V)), prepared(memory.numbers),
          scores(prepared + FEW * numbers) {}
};

// One layer of x [M, H], its keys and values in stored[0] and stored[1]. y may be x.
static void run_layer(const Layer& a, const Run& run, const Work& work, const Own& own, const float* x, float* const* stored,
                      float* y) {
    const int64_t tokens = run.tokens();
    const float* normed = norms(x, a.first_norm, tokens, a.hidden, a.epsilon, own.prepared, work.normed);
    multiply(a.qkv, tokens, normed, nullptr, work.qkv);
    meet();
    place(a, run, work.qkv, stored[0], stored[1]);
    meet();
    attend_all(a, run, work.qkv, stored[0], stored[1], own.scores, work.seen);
    meet();
    multiply(a.out, tokens, work.seen, x, work.middle);
    meet();
    normed = norms(work.middle, a.second_norm, tokens, a.hidden, a.epsilon, own.prepared, work.normed);
    multiply(a.gate_up.part(0, a.inner), tokens, normed, nullptr, work.gates);
    multiply(a.gate_up.part(a.inner, a.inner), tokens, normed, nullptr, work.ups);
    gate(a, tokens, work.gates, work.ups, work.product);
    meet();
    multiply(a.down, tokens, work.product, work.middle, y);
    meet();
}

// The first of the best of n numbers; 0 where there is none
static int64_t best(const float* x, int64_t n) {
    vec most = all(-INFINITY);
    int64_t i = 0;
    for (; i + V <= n; i += V) most = load(x + i) > most ? load(x + i) : most;
    float top = -INFINITY;
    for (int lane = 0; lane < V; lane++) top = most[lane] > top ? most[lane] : top;
    for (; i < n; i++) top = x[i] > top ? x[i] : top;
    for (i = 0; i < n; i++)
        if (x[i] == top) return i;
    return 0;
}

// The best output of every token: each thread's among those that it made, then of all.
struct Bests {
    int64_t tokens;
    Memory<int64_t> rows;  // [threads, M]
    explicit Bests(int64_t tokens) : tokens(tokens), rows(omp_get_max_threads() * tokens) {}
    void find(const float* logits, int64_t outputs) const {
        const Share mine(outputs, UNIT);
        int64_t* row = rows.numbers + omp_get_thread_num() * tokens;
        for (int64_t m = 0; m < tokens; m++) row[m] = mine.first + best(logits + m * outputs + mine.first, mine.last - mine.first);
    }
    // after `find` and `meet`
    int64_t of(const float* logits, int64_t outputs, int64_t m) const {
        int64_t found = rows.numbers[m];
        for (int thread = 1; thread < omp_get_num_threads(); thread++) {
            const int64_t row = rows.numbers[thread * tokens + m];
            if (logits[m * outputs + row] > logits[m * outputs + found]) found = row;
        }
        return found;
    }
};

// A pass over the trunk: what goes before and after its layers.
struct Pass {
    Run run;
    const int64_t* tokens;  // [M], embedded into run.x; null: it is there already
    const float* embedding;  // [vocabulary, H]
    int64_t vocabulary;
    const float* norm;  // after the last layer; null: the layers are all
    float epsilon;
    float* normed;  // [M, H]
    Matrix output;
    float* logits;  // [M, outputs]; null: they are not asked for
    int64_t* best;  // [M] the best token of each
};

// Layers from `layer` on. What the last one left.
static const float* run_all(const Layer* layer, const Run& run, const Own& own) {
    const int64_t numbers = run.tokens() * layer->hidden;
    const Work work(*layer, run.tokens(), run.scratch);
    const float* x = run.x;
    for (int64_t l = 0; l < run.layers; l++, layer = layer->next) {
        float* y = run.y + run.ends[l] * numbers;
        run_layer(*layer, run, work, own, x, run.stored + 2 * l, y);
        x = y;
    }
    return x;
}

extern "C" {

// Whether there is a matrix unit, and the system lets this process use it.
int64_t matrix_unit() { return unit_granted(); }

void product(const Matrix* a, int64_t tokens, const float* x, float* y) {
#pragma omp parallel
    multiply(*a, tokens, x, nullptr, y);
}

void normalize(const float* weight, int64_t tokens, int64_t n, float epsilon, const float* x, float* y) {
#pragma omp parallel if (tokens > 32)
    {
        const Share mine(tokens);
        for (int64_t m = mine.first; m < mine.last; m++) norm(x + m * n, weight, n, epsilon, y + m * n);
    }
}

// Layers from `layer` on.
void run_layers(const Layer* layer, const Run* what) {
#pragma omp parallel
    run_all(layer, *what, Own(*what, layer->hidden));
}

// The place of a token beyond the vocabulary, before anything is done; -1 where there is none.
int64_t score(const Layer* layer, const Pass* what) {
    const Pass& pass = *what;
    const int64_t tokens = pass.run.tokens(), hidden = layer->hidden, outputs = pass.output.outputs;
    for (int64_t m = 0; pass.tokens && m < tokens; m++)
        if (pass.tokens[m] < 0 || pass.tokens[m] >= pass.vocabulary) return m;
    const Bests bests(tokens);
#pragma omp parallel
    {
        const Own own(pass.run, hidden);
        const Share mine(tokens);
        if (pass.tokens) {
            for (int64_t m = mine.first; m < mine.last; m++)
                for (int64_t i = 0; i < hidden; i++)
                    ((float*)pass.run.x)[m * hidden + i] = pass.embedding[pass.tokens[m] * hidden + i];
            meet();
        }
        const float* x = run_all(layer, pass.run, own);
        if (pass.norm)
            for (int64_t m = mine.first; m < mine.last; m++)
                norm(x + m * hidden, pass.norm, hidden, pass.epsilon, pass.normed + m * hidden);
        if (pass.logits) {
            meet();
            multiply(pass.output, tokens, pass.normed, nullptr, pass.logits);
            bests.find(pass.logits, outputs);
            meet();
            for (int64_t m = mine.first; m < mine.last; m++) pass.best[m] = bests.of(pass.logits, outputs, m);
        }
    }
    return -1;
}
}
