// Products on the processor's matrix unit (Intel's AMX). Included by kernel.cpp.
//
// The unit multiplies bfloat16 numbers and adds them in float32, or bytes and adds them as whole numbers. So every number of
// a token is split into three of that kind, and a token is three rows of the unit's left operand; its result is the sum of
// theirs. Each row is summed by itself, in the same order however many there are.
//
// The right operand is a tile of 16 outputs, 1 KB: [16, 16 outputs, 4 bytes], in every four bytes what follows each other in
// the input. A matrix is tiles side by side, [outputs / 16, inputs / INPUTS], which the processor reads from one end to the
// other.
#if defined(__AMX_BF16__) && defined(__AMX_INT8__) && defined(__AVX512F__)
#include <sys/syscall.h>
#include <unistd.h>

constexpr int64_t LINE = 64, TILE_SIZE = 16 * LINE;  // bytes of a row, and of a tile
constexpr int64_t PARTS = 3;                         // of a number
constexpr int64_t TOGETHER = 16;                     // tokens whose sums are kept in the unit: three tiles of 16 rows
constexpr int64_t SPLIT = 512;                       // tokens whose parts are in memory at once
constexpr int64_t BEFORE = 2 * TILE_SIZE;            // how far ahead of its use a tile is fetched
// The unit's tiles, which only digits name: 0 to 2 are sums of whole groups of 16 rows, 3 of what is left; 4 weights;
// 5 and 6 rows, of a whole group and of what is left.
constexpr int REST_SUMS = 3, REST_ROWS = 6;

static bool unit_granted() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }  // ARCH_REQ_XCOMP_PERM, XTILEDATA

static inline void configure(int64_t rest) {
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } tiles = {};
    tiles.palette = 1;
    for (int tile = 0; tile <= REST_ROWS; tile++) {
        tiles.bytes[tile] = LINE;
        tiles.rows[tile] = tile == REST_SUMS || tile == REST_ROWS ? rest : 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(tiles));  // GCC 12's own way does not say that it reads all of them
}

// A float is the sum of three bfloat16 numbers, exactly: its leading eight bits, the next eight, and the last.
struct Floats {
    static constexpr bool WHOLE = false;
    static constexpr int64_t INPUTS = 32;
    static float unit(const float*, int64_t) { return 1; }
    static void split(vec x, float, char* y) {
        for (int part = 0; part < PARTS; part++) {
            const ints upper = (ints)x & (int32_t)0xFFFF0000;
            _mm256_storeu_si256((__m256i*)(y + part * LINE), _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)upper, 16)));
            x -= (vec)upper;
        }
    }
    static vec sum(const float* sums, float) { return load(sums) + (load(sums + V) + load(sums + 2 * V)); }
};

// In units of which a token's largest number has 127 * 65536, a number is a whole one: three bytes, each with a sign.
struct Bytes {
    static constexpr bool WHOLE = true;
    static constexpr int64_t INPUTS = 64;
    static float unit(const float* x, int64_t n) {
        __m512 most = {};
        for (int64_t i = 0; i < n; i += V) most = _mm512_max_ps(most, _mm512_abs_ps((__m512)load(x + i)));
        const float largest = _mm512_reduce_max_ps(most);
        return largest < 1e-30f ? 0 : largest / (127 * 65536);
    }
    static void split(vec x, float unit, char* y) {
        ints whole = (ints)_mm512_cvtps_epi32((__m512)(unit > 0 ? x / unit : vec{}));
        for (int part = PARTS - 1; part >= 0; part--) {
            const ints rest = (whole + 128) >> 8;
            _mm_storeu_si128((__m128i*)(y + part * LINE), _mm512_cvtepi32_epi8((__m512i)(whole - (rest << 8))));
            whole = rest;
        }
    }
    static vec sum(const float* sums, float unit) {
        const auto part = [=](int i) { return (vec)_mm512_cvtepi32_ps((__m512i)load(sums + i * V)); };
        return ((part(0) * 256.0f + part(1)) * 256.0f + part(2)) * unit;
    }
};

// The parts of tokens x [M, inputs], as the unit reads them: [inputs / INPUTS, M, PARTS, 64 bytes].
template <class Number>
static inline void split(const float* x, const float* units, int64_t tokens, int64_t inputs, char* y) {
    for (int64_t m = 0; m < tokens; m++)
        for (int64_t i = 0; i < inputs; i += V) {
            char* to = y + (i / Number::INPUTS * tokens + m) * PARTS * LINE;
            Number::split(load(x + m * inputs + i), units[m], to + i % Number::INPUTS * LINE / Number::INPUTS);
        }
}

#define ADD_PRODUCT(sums, rows)                          \
    if constexpr (Number::WHOLE)                         \
        _tile_dpbssd(sums, rows, 4);                     \
    else                                                 \
        _tile_dpbf16ps(sums, rows, 4);

// Sums [rows, 16] of 16 outputs: GROUPS of 16 rows, and what is left.
template <class Number, int GROUPS, bool LEFT, bool FIRST>
static inline void sum_tiles(const char* weight, int64_t steps, const char* x, int64_t rows, float* y) {
    if constexpr (GROUPS > 0) _tile_zero(0);
    if constexpr (GROUPS > 1) _tile_zero(1);
    if constexpr (GROUPS > 2) _tile_zero(2);
    if constexpr (LEFT) _tile_zero(3);
    for (int64_t step = 0; step < steps; step++, weight += TILE_SIZE, x += rows * LINE) {
        if (FIRST)
            for (int64_t i = 0; i < TILE_SIZE; i += LINE) __builtin_prefetch(weight + BEFORE + i, 0, 3);
        _tile_loadd(4, weight, LINE);
        if constexpr (GROUPS > 0) {
            _tile_loadd(5, x, LINE);
            ADD_PRODUCT(0, 5)
        }
        if constexpr (GROUPS > 1) {
            _tile_loadd(5, x + 16 * LINE, LINE);
            ADD_PRODUCT(1, 5)
        }
        if constexpr (GROUPS > 2) {
            _tile_loadd(5, x + 32 * LINE, LINE);
            ADD_PRODUCT(2, 5)
        }
        if constexpr (LEFT) {
            _tile_loadd(6, x + GROUPS * 16 * LINE, LINE);
            ADD_PRODUCT(3, 6)
        }
    }
    if constexpr (GROUPS > 0) _tile_stored(0, y, LINE);
    if constexpr (GROUPS > 1) _tile_stored(1, y + 256, LINE);
    if constexpr (GROUPS > 2) _tile_stored(2, y + 512, LINE);
    if constexpr (LEFT) _tile_stored(3, y + GROUPS * 256, LINE);
}

template <class Number, bool FIRST>
static inline void sum_tokens(const char* weight, int64_t steps, const char* x, int64_t tokens, float* y) {
    const int64_t rows = PARTS * tokens;
    switch (rows / 16 * 2 + (rows % 16 != 0)) {
        case 1: return sum_tiles<Number, 0, true, FIRST>(weight, steps, x, rows, y);
        case 2: return sum_tiles<Number, 1, false, FIRST>(weight, steps, x, rows, y);
        case 3: return sum_tiles<Number, 1, true, FIRST>(weight, steps, x, rows, y);
        case 4: return sum_tiles<Number, 2, false, FIRST>(weight, steps, x, rows, y);
        case 5: return sum_tiles<Number, 2, true, FIRST>(weight, steps, x, rows, y);
        case 6: return sum_tiles<Number, 3, false, FIRST>(weight, steps, x, rows, y);
    }
}

// As `multiply` of rows. Every thread splits the tokens for itself: that takes less time than waiting for another.
template <class Number>
static void multiply_tiles(const Matrix& a, int64_t tokens, const float* x, const float* add, float* y) {
    if (tokens > SPLIT) {
        for (int64_t m = 0; m < tokens; m += SPLIT)
            multiply_tiles<Number>(a, tokens - m < SPLIT ? tokens - m : SPLIT, x + m * a.inputs,
                                   add ? add + m * a.outputs : nullptr, y + m * a.outputs);
        return;
    }
    const int64_t steps = a.inputs / Number::INPUTS, size = steps * PARTS * LINE, rest = PARTS * (tokens % TOGETHER) % 16;
    void* memory = malloc(tokens * (size + sizeof(float)) + 2 * LINE);
    char* parts = (char*)(((uintptr_t)memory + LINE - 1) / LINE * LINE);
    float* units = (float*)(parts + tokens * size);
    for (int64_t m = 0; m < tokens; m++) units[m] = Number::unit(x + m * a.inputs, a.inputs);
    for (int64_t m = 0; m < tokens; m += TOGETHER)
        split<Number>(x + m * a.inputs, units + m, tokens - m < TOGETHER ? tokens - m : TOGETHER, a.inputs, parts + m * size);
    configure(rest ? rest : 16);
    const Share mine(a.outputs, UNIT);
    for (int64_t row = mine.first; row < mine.last; row += UNIT) {
        const char* weight = (const char*)a.weight + row / UNIT * steps * TILE_SIZE;
        alignas(LINE) float sums[TOGETHER * PARTS * UNIT];
        for (int64_t first = 0; first < tokens; first += TOGETHER) {
            const int64_t count = tokens - first < TOGETHER ? tokens - first : TOGETHER;
            if (first == 0)
                sum_tokens<Number, true>(weight, steps, parts, count, sums);
            else
                sum_tokens<Number, false>(weight, steps, parts + first * size, count, sums);
            for (int64_t m = 0; m < count; m++) {
                const int64_t to = (first + m) * a.outputs + row;
                vec total = Number::sum(sums + m * PARTS * UNIT, units[first + m]);
                if (Number::WHOLE) total *= load(a.scale + row);
                if (a.bias) total += load(a.bias + row);
                if (add) total += load(add + to);
                store(y + to, total);
            }
        }
    }
    _tile_release();
    free(memory);
}
#undef ADD_PRODUCT
#else
struct Floats;
struct Bytes;
static bool unit_granted() { return false; }
template <class Number>
static void multiply_tiles(const Matrix&, int64_t, const float*, const float*, float*) {}
#endif
