// One decoder layer for a few tokens, float32. Built by mtp/compiled.py for the machine that it runs on.
//
// With few tokens a layer costs what reading its weights costs. So every weight is read once, in order and for all
// tokens, each thread its own rows. A number is summed in the same order however many tokens run beside it: what a
// token gets does not depend, by a single bit, on how many are scored with it.
//
// Shapes: B texts, W tokens of each, M = B * W, H hidden size, Q query and K key heads of size D, I inner size,
// S slots. Matrices are row by row, outputs first.
#include <cmath>
#include <cstdint>
#include <cstdlib>

#ifdef __AVX512F__
constexpr int V = 16, TOKENS = 8, SUMS = 32;  // numbers in a register; tokens that share one load of a weight;
#else                                         // sums that are kept in registers
constexpr int V = 8, TOKENS = 4, SUMS = 8;
#endif
constexpr int ROWS = 4;  // outputs computed side by side

typedef float vec __attribute__((vector_size(4 * V), aligned(4)));
typedef int32_t ints __attribute__((vector_size(4 * V), aligned(4)));

static inline vec load(const float* p) { return *(const vec*)p; }
static inline void store(float* p, vec x) { *(vec*)p = x; }
static inline vec all(float x) { return x - vec{}; }

// The sum of all numbers in a register, by halves.
static inline float sum(vec x) {
#if __has_builtin(__builtin_shufflevector)
    typedef float eight __attribute__((vector_size(32)));
    typedef float four __attribute__((vector_size(16)));
#ifdef __AVX512F__
    eight y = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
              __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
#else
    eight y = x;
#endif
    four z = __builtin_shufflevector(y, y, 0, 1, 2, 3) + __builtin_shufflevector(y, y, 4, 5, 6, 7);
    z += __builtin_shufflevector(z, z, 2, 3, 0, 1);
    return z[0] + z[1];
#else  // GCC before 12
    float part[V];
    store(part, x);
    for (int half = V / 2; half > 0; half /= 2)
        for (int i = 0; i < half; i++) part[i] += part[i + half];
    return part[0];
#endif
}

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

struct Matrix {
    const float *weight, *bias;  // [outputs, inputs], [outputs] or null
    int64_t outputs, inputs;
};

// y[m, r] = x[m] . weight[r] + bias[r] + add[m, r] for M tokens and R rows from `row` on.
template <int M, int R, bool FIRST>
static inline void dots(const Matrix& a, const float* x, const float* add, float* y, int64_t row) {
    const int64_t n = a.inputs;
    const float* w = a.weight + row * n;
    vec sums[M][R] = {};
    int64_t i = 0;
    for (; i + V <= n; i += V) {
        vec part[R];
        for (int r = 0; r < R; r++) {
            part[r] = load(w + r * n + i);
            if (FIRST) __builtin_prefetch(w + (ROWS + r) * n + i);  // of the next block: rows are too short to foresee
        }
        for (int m = 0; m < M; m++) {
            vec token = load(x + m * n + i);
            for (int r = 0; r < R; r++) sums[m][r] += part[r] * token;
        }
    }
    for (int m = 0; m < M; m++)
        for (int r = 0; r < R; r++) {
            float total = sum(sums[m][r]);
            for (int64_t j = i; j < n; j++) total = std::fma(x[m * n + j], w[r * n + j], total);
            if (a.bias) total += a.bias[row + r];
            if (add) total += add[m * a.outputs + row + r];
            y[m * a.outputs + row + r] = total;
        }
}

template <int M, int R, bool FIRST>
static inline void block(const Matrix& a, const float* x, const float* add, float* y, int64_t row) {
    if constexpr (M * R > SUMS) {
        block<M, R / 2, FIRST>(a, x, add, y, row);
        block<M, R / 2, FIRST>(a, x, add, y, row + R / 2);
    } else
        dots<M, R, FIRST>(a, x, add, y, row);
}

// R rows for all tokens; the first tokens bring the weights in, the others find them in the cache.
template <int R>
static inline void rows(const Matrix& a, int64_t tokens, const float* x, const float* add, float* y, int64_t row) {
    int64_t m = 0;
    auto some = [&](auto kernel, int count) {
        kernel(a, x + m * a.inputs, add ? add + m * a.outputs : nullptr, y + m * a.outputs, row);
        m += count;
    };
    if (tokens >= TOKENS)
        some(block<TOKENS, R, true>, TOKENS);
    else if (tokens >= 4)
        some(block<4, R, true>, 4);
    else if (tokens >= 2)
        some(block<2, R, true>, 2);
    else
        some(block<1, R, true>, 1);
    while (m + TOKENS <= tokens) some(block<TOKENS, R, false>, TOKENS);
    while (m + 4 <= tokens) some(block<4, R, false>, 4);
    while (m + 2 <= tokens) some(block<2, R, false>, 2);
    while (m < tokens) some(block<1, R, false>, 1);
}

// To be called by all threads of a parallel region; they meet at its end.
static void multiply(const Matrix& a, int64_t tokens, const float* x, const float* add, float* y) {
    const int64_t blocks = (a.outputs + ROWS - 1) / ROWS;
#pragma omp for schedule(static)
    for (int64_t block = 0; block < blocks; block++) {
        const int64_t row = block * ROWS;
        if (row + ROWS <= a.outputs)
            rows<ROWS>(a, tokens, x, add, y, row);
        else
            for (int64_t r = row; r < a.outputs; r++) rows<1>(a, tokens, x, add, y, r);
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

static void norms(const float* x, const float* weight, int64_t tokens, int64_t n, float epsilon, float* y) {
#pragma omp for schedule(static)
    for (int64_t m = 0; m < tokens; m++) norm(x + m * n, weight, n, epsilon, y + m * n);
}

struct Layer {
    Matrix qkv, out, gate_up, down;
    const float *first_norm, *second_norm, *query_norm, *key_norm;  // the last two are null but in qwen3
    int64_t hidden, inner, queries, keys, size;
    float epsilon, scale;
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
};

// scores[w, s] = q_w . k_s * scale for the slots from `first` to `last`
static inline void score(const Queries& a, int64_t first, int64_t last, int64_t row, float* scores) {
    for (int64_t w = 0; w < a.count; w++) {
        const float* q = a.q + w * a.q_step;
        for (int64_t s = first; s < last; s++) {
            if (s >= a.limit(w) || (a.mask && !a.mask[w * a.slots + s])) continue;
            const float* k = a.k + s * a.size;
            vec products = {};
            int64_t i = 0;
            for (; i + V <= a.size; i += V) products += load(q + i) * load(k + i);
            float total = sum(products);
            for (; i < a.size; i++) total = std::fma(q[i], k[i], total);
            scores[w * row + s] = total * a.scale;
        }
    }
}

// e^(score - best) in place of n scores; their sum
static inline float exponentials(float* scores, int64_t n) {
    float best = -INFINITY;
    for (int64_t s = 0; s < n; s++) best = scores[s] > best ? scores[s] : best;
    vec total = {};
    for (int64_t s = 0; s < n; s += V) {
        vec weight = exponential(load(scores + s) - best);
        store(scores + s, weight);
        total += weight;
    }
    return sum(total);
}

// z += weight[s] v_s for the slots from `first` to `last`, for N registers of numbers: together they hide each
// other's latency.
template <int N>
static inline void add_values(const float* v, int64_t size, const float* weight, int64_t first, int64_t last, float* z) {
    vec total[N];
    for (int j = 0; j < N; j++) total[j] = load(z + j * V);
    for (int64_t s = first; s < last; s++)
        for (int j = 0; j < N; j++) total[j] += weight[s] * load(v + s * size + j * V);
    for (int j = 0; j < N; j++) store(z + j * V, total[j]);
}

// y_w += scores[w, s] v_s for the slots from `first` to `last`
static inline void gather(const Queries& a, int64_t first, int64_t last, int64_t row, const float* scores) {
    for (int64_t w = 0; w < a.count; w++) {
        const float* weight = scores + w * row;
        const int64_t end = last < a.limit(w) ? last : a.limit(w);
        float* z = a.y + w * a.y_step;
        int64_t i = 0;
        for (; i + 4 * V <= a.size; i += 4 * V) add_values<4>(a.v + i, a.size, weight, first, end, z + i);
        for (; i + 2 * V <= a.size; i += 2 * V) add_values<2>(a.v + i, a.size, weight, first, end, z + i);
        for (; i + V <= a.size; i += V) add_values<1>(a.v + i, a.size, weight, first, end, z + i);
        for (; i < a.size; i++)
            for (int64_t s = first; s < end; s++) z[i] = std::fma(weight[s], a.v[s * a.size + i], z[i]);
    }
}

// softmax(q k) v of every query; keys and values are taken in tiles that stay in the processor's cache while all
// queries look at them. count is at most 64.
static void attend(const Queries& a, float* scores) {
    constexpr int64_t TILE = 64;
    const int64_t row = (a.slots + V - 1) / V * V;
    float whole[64];
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

extern "C" {

void product(const Matrix* a, int64_t tokens, const float* x, float* y) {
#pragma omp parallel
    multiply(*a, tokens, x, nullptr, y);
}

// x [M, H] -> queries, keys and values y [M, Q + 2K, D]; cosines and sines [B, W, D], or
// [1, W, D] where shared, the first half of the sines negative.
void project(const Layer* layer, int64_t tokens, int64_t angles, const float* x, const float* cosines,
             const float* sines, float* scratch, float* y) {
    const Layer& a = *layer;
    const int64_t turning = a.queries + a.keys, half = a.size / 2;
#pragma omp parallel
    {
        norms(x, a.first_norm, tokens, a.hidden, a.epsilon, scratch);
        multiply(a.qkv, tokens, scratch, nullptr, y);
#pragma omp for schedule(static)
        for (int64_t i = 0; i < tokens * turning; i++) {
            const int64_t m = i / turning, head = i % turning;
            float* z = y + (m * (turning + a.keys) + head) * a.size;
            const float* weight = head < a.queries ? a.query_norm : a.key_norm;
            if (weight) norm(z, weight, a.size, a.epsilon, z);
            const float *c = cosines + m % angles * a.size, *s = sines + m % angles * a.size;
            for (int64_t j = 0; j < half; j++) {
                const float low = z[j], high = z[j + half];
                z[j] = low * c[j] + high * s[j];
                z[j + half] = high * c[j + half] + low * s[j + half];
            }
        }
    }
}

// The rest of the layer: x [M, H] and what `project` made of it -> y [M, H]. k and v have `batch` and `head` numbers
// from one text or head to the next. mask [B or 1, W, S] (mask_step: W * S or 0), null: causal, the last token sees all.
void finish(const Layer* layer, int64_t texts, int64_t width, int64_t slots, const float* x, const float* qkv,
            const float* k, const float* v, int64_t batch, int64_t head, const uint8_t* mask, int64_t mask_step,
            float* scratch, float* y) {
    const Layer& a = *layer;
    const int64_t tokens = texts * width, group = a.queries / a.keys;
    float *seen = scratch, *middle = seen + tokens * a.queries * a.size, *normed = middle + tokens * a.hidden,
          *inner = normed + tokens * a.hidden, *product = inner + tokens * 2 * a.inner;
#pragma omp parallel
    {
        float* scores = (float*)malloc(width * (slots + V) * sizeof(float));
#pragma omp for schedule(static)
        for (int64_t i = 0; i < texts * a.queries; i++) {
            const int64_t b = i / a.queries, q = i % a.queries, at = b * batch + q / group * head;
            const int64_t from = (a.queries + 2 * a.keys) * a.size, to = a.queries * a.size;  // a token's numbers
            attend({qkv + b * width * from + q * a.size, k + at, v + at, seen + b * width * to + q * a.size, from, to,
                    width, slots, a.size, mask ? mask + b * mask_step : nullptr, a.scale},
                   scores);
        }
        free(scores);
        multiply(a.out, tokens, seen, x, middle);
        norms(middle, a.second_norm, tokens, a.hidden, a.epsilon, normed);
        multiply(a.gate_up, tokens, normed, nullptr, inner);
#pragma omp for schedule(static)
        for (int64_t m = 0; m < tokens; m++) {
            const float *gate = inner + m * 2 * a.inner, *up = gate + a.inner;
            float* z = product + m * a.inner;
            int64_t i = 0;
            for (; i + V <= a.inner; i += V) {
                vec g = load(gate + i);
                store(z + i, g / (1.0f + exponential(-g)) * load(up + i));
            }
            for (; i < a.inner; i++) z[i] = gate[i] / (1.0f + std::exp(-gate[i])) * up[i];
        }
        multiply(a.down, tokens, product, middle, y);
    }
}
}
