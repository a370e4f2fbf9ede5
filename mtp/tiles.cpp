// Products on the processor's matrix unit (Intel's AMX), for weights that are bfloat16 numbers. Included by kernel.cpp.
//
// The unit multiplies bfloat16 numbers and adds in float32. A float is the sum of three bfloat16 numbers, exactly: its
// leading eight bits, the next eight, and the last. So every token is three rows of the unit's left operand, and its
// result the sum of their three results. Each row is summed by itself, in the same order however many there are.
//
// The right operand is a tile of 32 inputs of 16 outputs, 1 KB: [16 pairs of inputs, 16 outputs, 2]. A matrix is tiles
// side by side, [outputs / 16, inputs / 32], which the processor reads from one end to the other.
#if defined(__AMX_BF16__) && defined(__AVX512F__)
#include <sys/syscall.h>
#include <unistd.h>

constexpr int64_t OUTPUTS = 16, INPUTS = 32, TILE_SIZE = OUTPUTS * INPUTS;
constexpr int64_t PARTS = 3;     // bfloat16 numbers of a float
constexpr int64_t TOGETHER = 16;  // tokens whose sums are kept in the unit: three tiles of 16 rows
constexpr int64_t BEFORE = 2 * TILE_SIZE;  // how far ahead of its use a tile is fetched, in weights
// The unit's tiles, which only digits name: 0 to 2 are sums of whole groups of 16 rows, 3 of what is left; 4 weights;
// 5 and 6 rows, of a whole group and of what is left.
constexpr int REST_SUMS = 3, REST_ROWS = 6;

static bool unit_granted() { return syscall(SYS_arch_prctl, 0x1023, 18) == 0; }  // ARCH_REQ_XCOMP_PERM, XTILEDATA

static inline void configure(int64_t rest) {
    struct { uint8_t palette, start, none[14]; uint16_t bytes[16]; uint8_t rows[16]; } tiles = {};
    tiles.palette = 1;
    for (int tile = 0; tile <= REST_ROWS; tile++) {
        tiles.bytes[tile] = 64;
        tiles.rows[tile] = tile == REST_SUMS || tile == REST_ROWS ? rest : 16;
    }
    _tile_loadconfig(&tiles);
}

// The parts of tokens x [M, inputs], as the unit reads them: [inputs / 32, M, PARTS, 32].
static inline void split(const float* x, int64_t tokens, int64_t inputs, uint16_t* y) {
    for (int64_t m = 0; m < tokens; m++)
        for (int64_t i = 0; i < inputs; i += V) {
            uint16_t* to = y + i / INPUTS * tokens * PARTS * INPUTS + m * PARTS * INPUTS + i % INPUTS;
            vec left = load(x + m * inputs + i);
            for (int part = 0; part < PARTS; part++) {
                const ints upper = (ints)left & (int32_t)0xFFFF0000;
                _mm256_storeu_si256((__m256i*)(to + part * INPUTS), _mm512_cvtepi32_epi16(_mm512_srli_epi32((__m512i)upper, 16)));
                left -= (vec)upper;
            }
        }
}

// Sums [rows, 16] of 16 outputs: WHOLE groups of 16 rows, and what is left.
template <int WHOLE, bool LEFT, bool FIRST>
static inline void sum_tiles(const uint16_t* weight, int64_t steps, const uint16_t* x, int64_t rows, float* y) {
    if constexpr (WHOLE > 0) _tile_zero(0);
    if constexpr (WHOLE > 1) _tile_zero(1);
    if constexpr (WHOLE > 2) _tile_zero(2);
    if constexpr (LEFT) _tile_zero(3);
    for (int64_t step = 0; step < steps; step++, weight += TILE_SIZE, x += rows * INPUTS) {
        if (FIRST)
            for (int64_t i = 0; i < TILE_SIZE; i += INPUTS) __builtin_prefetch(weight + BEFORE + i, 0, 3);
        _tile_loadd(4, weight, 64);
        if constexpr (WHOLE > 0) {
            _tile_loadd(5, x, 64);
            _tile_dpbf16ps(0, 5, 4);
        }
        if constexpr (WHOLE > 1) {
            _tile_loadd(5, x + 16 * INPUTS, 64);
            _tile_dpbf16ps(1, 5, 4);
        }
        if constexpr (WHOLE > 2) {
            _tile_loadd(5, x + 32 * INPUTS, 64);
            _tile_dpbf16ps(2, 5, 4);
        }
        if constexpr (LEFT) {
            _tile_loadd(6, x + WHOLE * 16 * INPUTS, 64);
            _tile_dpbf16ps(3, 6, 4);
        }
    }
    if constexpr (WHOLE > 0) _tile_stored(0, y, 64);
    if constexpr (WHOLE > 1) _tile_stored(1, y + 256, 64);
    if constexpr (WHOLE > 2) _tile_stored(2, y + 512, 64);
    if constexpr (LEFT) _tile_stored(3, y + WHOLE * 256, 64);
}

template <bool FIRST>
static inline void sum_tokens(const uint16_t* weight, int64_t steps, const uint16_t* x, int64_t tokens, float* y) {
    const int64_t rows = PARTS * tokens;
    switch (rows / 16 * 2 + (rows % 16 != 0)) {
        case 1: return sum_tiles<0, true, FIRST>(weight, steps, x, rows, y);
        case 2: return sum_tiles<1, false, FIRST>(weight, steps, x, rows, y);
        case 3: return sum_tiles<1, true, FIRST>(weight, steps, x, rows, y);
        case 4: return sum_tiles<2, false, FIRST>(weight, steps, x, rows, y);
        case 5: return sum_tiles<2, true, FIRST>(weight, steps, x, rows, y);
        case 6: return sum_tiles<3, false, FIRST>(weight, steps, x, rows, y);
    }
}

// As `multiply` of rows. Every thread splits the tokens for itself: that takes less time than waiting for another.
static void multiply_tiles(const Matrix& a, int64_t tokens, const float* x, const float* add, float* y) {
    const uint16_t* weight = (const uint16_t*)a.weight;
    const int64_t steps = a.inputs / INPUTS, size = PARTS * a.inputs, rest = PARTS * (tokens % TOGETHER) % 16;
    void* memory = malloc(tokens * size * sizeof(uint16_t) + 64);
    uint16_t* parts = (uint16_t*)(((uintptr_t)memory + 63) / 64 * 64);
    for (int64_t m = 0; m < tokens; m += TOGETHER)
        split(x + m * a.inputs, tokens - m < TOGETHER ? tokens - m : TOGETHER, a.inputs, parts + m * size);
    configure(rest ? rest : 16);
#pragma omp for schedule(static)
    for (int64_t row = 0; row < a.outputs; row += OUTPUTS) {
        alignas(64) float sums[TOGETHER * PARTS * OUTPUTS];
        for (int64_t first = 0; first < tokens; first += TOGETHER) {
            const int64_t count = tokens - first < TOGETHER ? tokens - first : TOGETHER;
            if (first == 0)
                sum_tokens<true>(weight + row * a.inputs, steps, parts, count, sums);
            else
                sum_tokens<false>(weight + row * a.inputs, steps, parts + first * size, count, sums);
            for (int64_t m = 0; m < count; m++) {
                const float* part = sums + m * PARTS * OUTPUTS;
                const int64_t to = (first + m) * a.outputs + row;
                vec total = load(part) + (load(part + OUTPUTS) + load(part + 2 * OUTPUTS));
                if (a.bias) total += load(a.bias + row);
                if (add) total += load(add + to);
                store(y + to, total);
            }
        }
    }
    _tile_release();
    free(memory);
}
#else
static bool unit_granted() { return false; }
static void multiply_tiles(const Matrix&, int64_t, const float*, const float*, float*) {}
#endif
