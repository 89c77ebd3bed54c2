// What every MSDA kernel shares: dtypes, vector access, and the geometry of one sample.
//
// Header-only and free of the standard library, so that NVRTC compiles it with nothing but the CUDA headers.
// Names: N batch, S cells of all levels, M heads, D channels a head, Lq queries, L levels, P points.

#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace msda {

typedef long long int64;

constexpr int kMaxLevels = 16;
constexpr unsigned kFullWarp = 0xffffffffu;
constexpr int kRow = 32;  // D of the kernels whose name ends in 32

// Filled by ops/msda/cuda/launch.py with struct.pack: keep the two in step.
struct Arguments {
    const void* value;             // (N, S, M, D)
    const void* locations;         // (N, Lq, M, L, P, 2) sampling locations, or offsets in the fused form
    const void* weights;           // (N, Lq, M, L, P) attention weights, or logits in the fused form
    const void* reference_points;  // (N, Lq, L, 2 or 4), fused form only
    const int* valid_sizes;        // (N, L, 2) as (h, w), or null
    void* output;                  // (N, Lq, M, D), forward only
    const void* grad_output;       // (N, Lq, M, D)
    void* grad_value;              // (N, S, M, D) in the accumulator's dtype, zeroed; or null
    void* grad_locations;          // like locations, or null
    void* grad_weights;            // like weights, or null
    float* grad_reference_points;  // (N, Lq, M, L, 2 or 4): still to be summed over heads; or null
    const float* scales;           // deterministic mode: [0] the factor into fixed point
    int N, S, M, Lq;
    int chunk;                     // queries a block; going through tiles: tiles; collect32: cells of one level
    int num_chunks;                // blocks a (batch, head)
    int num_levels;
    int tiles_x;                   // blocks take tiles of the maps, of which so many are a row; 0: chunks of queries
    int tiles_y;
    int max_cells;                 // scatter32: cells that fit in a block's shared memory; going through tiles:
                                   // queries of a block, at most; collect32: least blocks a level
    int sizes[2 * kMaxLevels];     // (H, W) a level
};

// ---- dtypes

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(__half x) { return __half2float(x); }
__device__ __forceinline__ float to_float(__nv_bfloat16 x) { return __bfloat162float(x); }

template <typename T>
__device__ __forceinline__ T from_float(float x);
template <>
__device__ __forceinline__ float from_float<float>(float x) { return x; }
template <>
__device__ __forceinline__ __half from_float<__half>(float x) { return __float2half_rn(x); }
template <>
__device__ __forceinline__ __nv_bfloat16 from_float<__nv_bfloat16>(float x) { return __float2bfloat16_rn(x); }

// two values packed into a register, the first in the low half
__device__ __forceinline__ float2 unpack(unsigned bits, __half) {
    return __half22float2(*reinterpret_cast<__half2*>(&bits));
}
__device__ __forceinline__ float2 unpack(unsigned bits, __nv_bfloat16) {
    return make_float2(__uint_as_float(bits << 16), __uint_as_float(bits & 0xffff0000u));
}
__device__ __forceinline__ unsigned pack(float a, float b, __half) {
    __half2 both = __floats2half2_rn(a, b);
    return *reinterpret_cast<unsigned*>(&both);
}
__device__ __forceinline__ unsigned pack(float a, float b, __nv_bfloat16) {
    __nv_bfloat162 both = __floats2bfloat162_rn(a, b);
    return *reinterpret_cast<unsigned*>(&both);
}

template <int kBytes>
struct Raw;
template <>
struct Raw<16> { typedef uint4 type; };
template <>
struct Raw<8> { typedef uint2 type; };
template <>
struct Raw<4> { typedef unsigned type; };
template <>
struct Raw<2> { typedef unsigned short type; };

// `kVector` neighbouring channels in one access
template <typename T, int kVector>
struct Vector {
    typedef typename Raw<sizeof(T) * kVector>::type raw;

    static __device__ __forceinline__ raw load_raw(const T* pointer) {
        return __ldg(reinterpret_cast<const raw*>(pointer));
    }

    static __device__ __forceinline__ void convert(raw bits, float (&x)[kVector]) {
        union { raw bits; T values[kVector]; unsigned words[(sizeof(T) * kVector + 3) / 4]; } u;
        u.bits = bits;
        if constexpr (sizeof(T) == 2 && kVector % 2 == 0) {
#pragma unroll
            for (int i = 0; i < kVector / 2; ++i) {
                const float2 both = unpack(u.words[i], T());
                x[2 * i] = both.x;
                x[2 * i + 1] = both.y;
            }
        } else {
#pragma unroll
            for (int i = 0; i < kVector; ++i) x[i] = to_float(u.values[i]);
        }
    }

    static __device__ __forceinline__ void load(const T* pointer, float (&x)[kVector]) {
        convert(load_raw(pointer), x);
    }

    static __device__ __forceinline__ void store(T* pointer, const float (&x)[kVector]) {
        union { raw bits; T values[kVector]; unsigned words[(sizeof(T) * kVector + 3) / 4]; } u;
        if constexpr (sizeof(T) == 2 && kVector % 2 == 0) {
#pragma unroll
            for (int i = 0; i < kVector / 2; ++i) u.words[i] = pack(x[2 * i], x[2 * i + 1], T());
        } else {
#pragma unroll
            for (int i = 0; i < kVector; ++i) u.values[i] = from_float<T>(x[i]);
        }
        *reinterpret_cast<raw*>(pointer) = u.bits;
    }
};

// ---- geometry

struct __align__(16) Level {
    int H, W, start;
    int valid_h, valid_w;  // cells that are image and not padding
};

// every thread of the block takes part; the caller synchronises
__device__ __forceinline__ void load_levels(const Arguments& args, int n, Level* levels) {
    const int level = threadIdx.x;
    if (level < args.num_levels) {
        int start = 0;
        for (int l = 0; l < level; ++l) start += args.sizes[2 * l] * args.sizes[2 * l + 1];
        const int H = args.sizes[2 * level], W = args.sizes[2 * level + 1];
        int valid_h = H, valid_w = W;
        if (args.valid_sizes != nullptr) {
            const int* valid = args.valid_sizes + (static_cast<int64>(n) * args.num_levels + level) * 2;
            valid_h = min(valid[0], H);
            valid_w = min(valid[1], W);
        }
        levels[level] = Level{H, W, start, valid_h, valid_w};
    }
}

// One sampling point: corner 0 is (y0, x0), 1 is (y0, x1), 2 is (y1, x0), 3 is (y1, x1).
struct Sample {
    float weight;    // attention weight; 0 if the sample is outside
    float fx, fy;    // fractions inside the cell
    int x0, y0;
    unsigned valid;  // bit k: corner k is on the map
    // index of each corner in S. A corner that is off the map repeats one that is not, so that loads need no
    // predicate; its weight is 0.
    int4 cells;
};

__device__ __forceinline__ Sample outside_sample() {
    Sample sample;
    sample.weight = sample.fx = sample.fy = 0.f;
    sample.x0 = sample.y0 = 0;
    sample.valid = 0;
    sample.cells = make_int4(0, 0, 0, 0);
    return sample;
}

// (x_px, y_px): pixels of the level, cell centres at integers
__device__ __forceinline__ Sample make_sample(float x_px, float y_px, float weight, const Level& level) {
    // false for NaN, so no such coordinate reaches the conversion to int
    if (!(x_px > -1.f && x_px < level.valid_w && y_px > -1.f && y_px < level.valid_h)) return outside_sample();
    const float x_floor = floorf(x_px), y_floor = floorf(y_px);
    const int x0 = static_cast<int>(x_floor), y0 = static_cast<int>(y_floor);
    const int left = max(x0, 0), right = min(x0 + 1, level.valid_w - 1);
    const int top = max(y0, 0), bottom = min(y0 + 1, level.valid_h - 1);
    Sample sample;
    sample.weight = weight;
    sample.fx = x_px - x_floor;
    sample.fy = y_px - y_floor;
    sample.x0 = x0;
    sample.y0 = y0;
    const unsigned columns = (x0 >= 0 ? 5u : 0u) | (x0 + 1 < level.valid_w ? 10u : 0u);
    const unsigned rows = (y0 >= 0 ? 3u : 0u) | (y0 + 1 < level.valid_h ? 12u : 0u);
    sample.valid = columns & rows;
    const int top_row = level.start + top * level.W, bottom_row = level.start + bottom * level.W;
    sample.cells = make_int4(top_row + left, top_row + right, bottom_row + left, bottom_row + right);
    return sample;
}

// attention weight times bilinear weight of each corner, 0 off the map
__device__ __forceinline__ float4 corner_weights(const Sample& sample) {
    const float right = sample.weight * sample.fx, left = sample.weight - right;
    const float right_bottom = right * sample.fy, left_bottom = left * sample.fy;
    return make_float4(
        sample.valid & 1 ? left - left_bottom : 0.f, sample.valid & 2 ? right - right_bottom : 0.f,
        sample.valid & 4 ? left_bottom : 0.f, sample.valid & 8 ? right_bottom : 0.f
    );
}

// A row is one head of one cell: `cell * M`, counted from the head's first. The product with the row's size is one
// instruction; left to itself the compiler folds the 64-bit base into it.
__device__ __forceinline__ int4 cell_rows(const int4& cells, int M) {
    return make_int4(cells.x * M, cells.y * M, cells.z * M, cells.w * M);
}

template <int kD, typename T>
__device__ __forceinline__ T* row_pointer(T* base, int row) {
    unsigned long long address;
    asm("mad.wide.u32 %0, %1, %2, %3;"
        : "=l"(address)
        : "r"(row), "n"(kD * sizeof(T)), "l"(reinterpret_cast<unsigned long long>(base)));
    return reinterpret_cast<T*>(address);
}

struct SampleGradient {
    float weight, x_px, y_px;
};

// `corners`: each corner's value times grad_output, of any value off the map
__device__ __forceinline__ SampleGradient sample_gradient(const Sample& sample, const float (&corners)[4]) {
    float dots[4];
#pragma unroll
    for (int k = 0; k < 4; ++k) dots[k] = sample.valid >> k & 1 ? corners[k] : 0.f;
    const float top = dots[1] - dots[0], bottom = dots[3] - dots[2];
    const float upper = fmaf(sample.fx, top, dots[0]), lower = fmaf(sample.fx, bottom, dots[2]);
    SampleGradient gradient;
    gradient.weight = fmaf(sample.fy, lower - upper, upper);
    gradient.x_px = sample.weight * fmaf(sample.fy, bottom - top, top);
    gradient.y_px = sample.weight * (lower - upper);
    return gradient;
}

}  // namespace msda
