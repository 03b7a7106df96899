// Adafactor on CUDA: three passes over tiles of all tensors, small sums between them.
//
//   sums      tiles     of g^2 by row and column, of p^2      (vectors: their variance)
//   means     lines     row_var, col_var
//   divisors  matrices  mean of row_var, at least eps; tensors: sum of p^2
//   squares   tiles     sum of update^2
//   scales    tensors   relative step, clipped
//   apply     tiles     update anew, parameter
//
// A warp takes a row of a tile, and a lane every 32nd number of it: accesses are single numbers
// that lie side by side in a warp, so no row need begin at a boundary, and eight of each operand
// are in flight. Sums are float64 in an order that depends on shapes alone. Nothing is read back to
// the host.
#pragma once

#include "../../math/optimizers/adafactor.h"
#include "adafactor_plan.cuh"
#include "layer_kernel.cuh"

namespace pyops::cuda {

struct AdafactorArguments : LayerArguments<AdafactorOptions> {
    const int64_t* factors;  // the plan's rows
    int64_t tiles, means, matrices;
    // Of the plan's workspace: see FactorColumn; one of each tile, matrix and tensor.
    double *row_sums, *column_sums, *tile_param, *tile_update, *divisors, *squared_param, *scales;

    // The workspace's parts, one after the other.
    void use(double* workspace, const AdafactorPlan& plan) {
        tiles = plan.tiles;
        means = plan.means;
        matrices = plan.matrices;
        row_sums = workspace;
        column_sums = row_sums + plan.row_sums;
        tile_param = column_sums + plan.column_sums;
        tile_update = tile_param + plan.tiles;
        divisors = tile_update + plan.tiles;
        squared_param = divisors + plan.matrices;
        scales = squared_param + plan.tensors;
    }
};

constexpr int WARPS = THREADS / WARP, OF_LANE = TILE_COLUMNS / WARP;
static_assert(MEAN_ROWS == THREADS && MEAN_COLUMNS == WARP && TILE_ROWS <= THREADS,
              "a row for each thread, a column for each lane");

// The tensor to which number `index` of tiles, means or matrices belongs; by all lanes alike.
__device__ __forceinline__ int tensor_of(const AdafactorArguments& a, FactorColumn first,
                                         int64_t index) {
    return row_of([&](int r) { return column(a.factors, r, first); }, a.rows, index, WarpVote{});
}

__device__ __forceinline__ double least_of(const AdafactorArguments& a, int r) {
    return __longlong_as_double(column(a.factors, r, LEAST));
}

__device__ __forceinline__ float step_of_tensor(const AdafactorArguments& a, int r) {
    return *pointer<const float>(a.table, r, STEP) + 1.0f;
}

// A tile of one tensor, in shared memory.
struct FactorTile : RowInMemory {
    Factored<float> rule;
    double weight;
    float *row_var, *col_var, *variance;  // of the tile's first row, first column, first number
    double *row_sums, *column_sums;       // the same
    double divisor;
    int64_t width, begin;  // of the matrix; the tile's first number in the tensor
    int rows, columns;

    __device__ __forceinline__ void enter(const AdafactorArguments& a, int r, int64_t tile) {
        const int64_t* const f = a.factors;
        point_to(a.table, r, OF_ANY_RULE);
        width = column(f, r, WIDTH);
        const int64_t height = column(f, r, HEIGHT), down = parts_of(height, TILE_ROWS),
                      across = parts_of(width, TILE_COLUMNS);
        const int64_t index = tile - column(f, r, FIRST_TILE), band = index / across,
                      matrix = band / down;
        const int64_t first_row = band % down * TILE_ROWS,
                      first_column = index % across * TILE_COLUMNS;
        begin = (matrix * height + first_row) * width + first_column;
        rows = static_cast<int>(height - first_row < TILE_ROWS ? height - first_row : TILE_ROWS);
        columns = static_cast<int>(width - first_column < TILE_COLUMNS ? width - first_column
                                                                       : TILE_COLUMNS);
        variance = pointer<float>(f, r, VARIANCE);
        if (variance) {
            variance += begin;
        } else {
            row_var = pointer<float>(f, r, ROW_VAR) + matrix * height + first_row;
            col_var = pointer<float>(f, r, COL_VAR) + matrix * width + first_column;
            row_sums = a.row_sums + column(f, r, ROW_SUMS) +
                       (matrix * across + index % across) * height + first_row;
            column_sums = a.column_sums + column(f, r, COLUMN_SUMS) + band * width + first_column;
            divisor = a.divisors[column(f, r, FIRST_MATRIX) + matrix];
        }
        step = step_of_tensor(a, r);
        weight = weight_of(a.options, static_cast<double>(step));
        rule.factor = static_cast<float>(a.options.maximize ? -a.factor() : a.factor());
        rule.eps = static_cast<float>(least_of(a, r));
        rule.decay = static_cast<float>(1.0 - a.rate(a.options.lr) * a.options.weight_decay);
        rule.scale = static_cast<float>(a.scales[r]);
    }

    // Numbers of a row of the tile that are there: a vector's last row is shorter.
    __device__ __forceinline__ int64_t left(int row) const {
        const int64_t rest = numel - (begin + row * width);
        return rest < columns ? rest : columns;
    }
    __device__ __forceinline__ int64_t at(int row) const {
        return begin + row * width + static_cast<int>(threadIdx.x % WARP);
    }
};

// This lane's numbers of a row, from `i` on; 0 for those that are not there.
__device__ __forceinline__ void load_row(const void* base, int64_t i, int dtype, int64_t left,
                                         float (&values)[OF_LANE]) {
    if (left == TILE_COLUMNS) {
        widen(load_as<DYNAMIC, OF_LANE, WARP>(base, i, dtype), values);
    } else {
        const int lane = threadIdx.x % WARP;
#pragma unroll
        for (int k = 0; k < OF_LANE; ++k)
            values[k] = lane + k * WARP < left
                            ? load_as<DYNAMIC, 1>(base, i + k * WARP, dtype).element[0]
                            : 0.0f;
    }
}

// Calls body(tile, number of the tile) for the tiles of this CTA.
template <typename Body>
__device__ __forceinline__ void for_tiles(const AdafactorArguments& a, FactorTile& tile,
                                          const Body& body) {
    for (int64_t index = blockIdx.x; index < a.tiles; index += gridDim.x) {
        const int r = tensor_of(a, FIRST_TILE, index);
        __syncthreads();  // the tile before has been read
        if (threadIdx.x == 0) tile.enter(a, r, index);
        __syncthreads();
        body(index);
    }
}

__global__ __launch_bounds__(THREADS, 3) void adafactor_sums_kernel(
    const __grid_constant__ AdafactorArguments a) {
    if (a.skips()) {
        if (a.zero_grads) zero_all_grads(a);
        return;
    }
    __shared__ FactorTile tile;
    __shared__ double of_warps[WARPS][TILE_COLUMNS];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    for_tiles(a, tile, [&](int64_t index) {
        double of_columns[OF_LANE] = {}, squared_param = 0.0;
        for (int row = warp; row < tile.rows; row += WARPS) {
            const int64_t i = tile.at(row), left = tile.left(row);
            float p[OF_LANE], g[OF_LANE];
            load_row(tile.master ? tile.master : tile.param, i,
                     tile.dtype(tile.master ? MASTER_DTYPE : PARAM_DTYPE), left, p);
            load_row(tile.grad, i, tile.dtype(GRAD_DTYPE), left, g);
            square_into<OF_LANE>(squared_param, p);
            if (tile.variance) {
                float* const variance = tile.variance + (i - tile.begin);
#pragma unroll
                for (int k = 0; k < OF_LANE; ++k) {
                    if (lane + k * WARP >= left) continue;
                    const double scaled =
                        static_cast<double>(g[k]) * static_cast<double>(tile.rule.factor);
                    const float before = load<FP32, 1>(variance, k * WARP).element[0];
                    store<FP32, 1>(variance, k * WARP,
                                   {{moved_towards(before, scaled * scaled, tile.weight)}});
                }
                continue;
            }
            double of_row = 0.0;
#pragma unroll
            for (int k = 0; k < OF_LANE; ++k) {
                const double square = static_cast<double>(g[k]) * static_cast<double>(g[k]);
                of_row += square;
                of_columns[k] += square;
            }
            of_row = warp_sum(of_row);
            if (lane == 0) tile.row_sums[row] = of_row;
        }
        if (!tile.variance) {
#pragma unroll
            for (int k = 0; k < OF_LANE; ++k) of_warps[warp][lane + k * WARP] = of_columns[k];
            __syncthreads();
            double sum = 0.0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += of_warps[w][threadIdx.x];
            if (static_cast<int>(threadIdx.x) < tile.columns) tile.column_sums[threadIdx.x] = sum;
        }
        const double param = block_sum<THREADS>(squared_param);
        if (threadIdx.x == 0) a.tile_param[index] = param;
    });
}

// The sums of a matrix's rows and columns over its tiles, in their order, and what follows from
// them.
__global__ __launch_bounds__(THREADS) void adafactor_means_kernel(
    const __grid_constant__ AdafactorArguments a) {
    if (a.skips()) return;
    __shared__ double of_warps[WARPS][WARP];
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    const double squared_factor = a.factor() * a.factor();
    for (int64_t index = blockIdx.x; index < a.means; index += gridDim.x) {
        const int r = tensor_of(a, FIRST_MEAN, index);
        const int64_t height = column(a.factors, r, HEIGHT), width = column(a.factors, r, WIDTH),
                      down = parts_of(height, TILE_ROWS), across = parts_of(width, TILE_COLUMNS);
        const int64_t each = means_of(height, width), of_rows = parts_of(height, MEAN_ROWS);
        const int64_t turn = index - column(a.factors, r, FIRST_MEAN), matrix = turn / each,
                      part = turn % each;
        const double weight = weight_of(a.options, static_cast<double>(step_of_tensor(a, r)));
        if (part < of_rows) {
            const int64_t row = part * MEAN_ROWS + threadIdx.x;
            if (row >= height) continue;
            const double* const sums =
                a.row_sums + column(a.factors, r, ROW_SUMS) + matrix * across * height + row;
            double sum = 0.0;
#pragma unroll 4
            for (int64_t t = 0; t < across; ++t) sum += sums[t * height];
            float* const variance = pointer<float>(a.factors, r, ROW_VAR) + matrix * height + row;
            *variance =
                moved_towards(*variance, sum * squared_factor / static_cast<double>(width), weight);
        } else {
            const int64_t at = (part - of_rows) * MEAN_COLUMNS + lane;
            const double* const sums =
                a.column_sums + column(a.factors, r, COLUMN_SUMS) + matrix * down * width + at;
            double sum = 0.0;
            if (at < width) {
#pragma unroll 8
                for (int64_t t = warp * down / WARPS; t < (warp + 1) * down / WARPS; ++t)
                    sum += sums[t * width];
            }
            __syncthreads();  // the turn before has been read
            of_warps[warp][lane] = sum;
            __syncthreads();
            if (warp > 0 || at >= width) continue;
            sum = 0.0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += of_warps[w][lane];
            float* const variance = pointer<float>(a.factors, r, COL_VAR) + matrix * width + at;
            *variance = moved_towards(*variance, sum * squared_factor / static_cast<double>(height),
                                      weight);
        }
    }
}

// The sum of a tensor's tiles by one CTA, in an order of its own; thread 0 gets it.
__device__ __forceinline__ double sum_of_tiles(const AdafactorArguments& a, int r,
                                               const double* of_tile) {
    const int64_t begin = column(a.factors, r, FIRST_TILE),
                  end = r + 1 < a.rows ? column(a.factors, r + 1, FIRST_TILE) : a.tiles;
    double sum = 0.0;
    for (int64_t t = begin + threadIdx.x; t < end; t += THREADS) sum += of_tile[t];
    return block_sum<THREADS>(sum);
}

__global__ __launch_bounds__(THREADS) void adafactor_divisors_kernel(
    const __grid_constant__ AdafactorArguments a) {
    if (a.skips()) return;
    for (int64_t index = blockIdx.x; index < a.matrices; index += gridDim.x) {
        const int r = tensor_of(a, FIRST_MATRIX, index);
        const int64_t matrix = index - column(a.factors, r, FIRST_MATRIX);
        if (matrix == 0) {
            const double squared = sum_of_tiles(a, r, a.tile_param);
            if (threadIdx.x == 0) a.squared_param[r] = squared;
        }
        if (column(a.factors, r, VARIANCE)) continue;
        const int64_t height = column(a.factors, r, HEIGHT);
        const float* const rows = pointer<const float>(a.factors, r, ROW_VAR) + matrix * height;
        double sum = 0.0;
        for (int64_t k = threadIdx.x; k < height; k += THREADS) sum += static_cast<double>(rows[k]);
        sum = block_sum<THREADS>(sum);
        if (threadIdx.x > 0) continue;
        const double mean = sum / static_cast<double>(height), least = least_of(a, r);
        a.divisors[index] = mean < least ? least : mean;
    }
}

// The updates of a tile's rows: body(row, first number of this lane, how many numbers of the row
// are there, u). The roots of the rows are worked out once a tile, those of the columns once a
// lane.
template <typename Body>
__device__ __forceinline__ void for_updates(const FactorTile& tile, float (&row_roots)[TILE_ROWS],
                                            const Body& body) {
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    if (static_cast<int>(threadIdx.x) < tile.rows)
        row_roots[threadIdx.x] =
            tile.variance ? 1.0f
                          : static_cast<float>(sqrt(static_cast<double>(tile.row_var[threadIdx.x]) /
                                                    tile.divisor));
    __syncthreads();
    float roots[OF_LANE];
    if (!tile.variance) {
#pragma unroll
        for (int k = 0; k < OF_LANE; ++k)
            roots[k] = lane + k * WARP < tile.columns ? sqrtf(tile.col_var[lane + k * WARP]) : 0.0f;
    }
    for (int row = warp; row < tile.rows; row += WARPS) {
        const int64_t i = tile.at(row), left = tile.left(row);
        float u[OF_LANE];
        if (tile.variance) {
            load_row(tile.variance - tile.begin, i, FP32, left, roots);
#pragma unroll
            for (int k = 0; k < OF_LANE; ++k) roots[k] = sqrtf(roots[k]);
        }
        load_row(tile.grad, i, tile.dtype(GRAD_DTYPE), left, u);
#pragma unroll
        for (int k = 0; k < OF_LANE; ++k) u[k] = tile.rule.update(u[k], row_roots[row], roots[k]);
        body(i, left, u);
    }
}

__global__ __launch_bounds__(THREADS, 3) void adafactor_squares_kernel(
    const __grid_constant__ AdafactorArguments a) {
    if (a.skips()) return;
    __shared__ FactorTile tile;
    __shared__ float row_roots[TILE_ROWS];
    for_tiles(a, tile, [&](int64_t index) {
        double sum = 0.0;
        for_updates(tile, row_roots, [&](int64_t, int64_t left, float (&u)[OF_LANE]) {
#pragma unroll
            for (int k = 0; k < OF_LANE; ++k)
                if (static_cast<int>(threadIdx.x % WARP) + k * WARP >= left) u[k] = 0.0f;
            square_into<OF_LANE>(sum, u);
        });
        sum = block_sum<THREADS>(sum);
        if (threadIdx.x == 0) a.tile_update[index] = sum;
    });
}

__global__ __launch_bounds__(THREADS) void adafactor_scales_kernel(
    const __grid_constant__ AdafactorArguments a) {
    if (a.skips()) return;
    for (int r = blockIdx.x; r < a.rows; r += gridDim.x) {
        const double squared = sum_of_tiles(a, r, a.tile_update);
        if (threadIdx.x > 0) continue;
        AdafactorOptions options = a.options;
        options.lr = a.rate(options.lr);
        a.scales[r] =
            relative_step(options, static_cast<double>(step_of_tensor(a, r)), a.squared_param[r],
                          squared, static_cast<double>(column(a.table, r, NUMEL)));
    }
}

// Stores N numbers, EACH apart, to the master, the parameter and its copy.
template <bool SR, int N, int EACH>
__device__ __forceinline__ void store_param(const FactorTile& tile, const AdafactorArguments& a,
                                            int64_t i, float (&p)[N]) {
    const int param = tile.dtype(PARAM_DTYPE);
    if (tile.master) {
        store_as<DYNAMIC, N, EACH>(tile.master, i, tile.dtype(MASTER_DTYPE), p, ToNearest{});
        store_as<DYNAMIC, N, EACH>(tile.param, i, param, p, ToNearest{});
    } else if constexpr (SR) {
        for (int k = 0; k < N; ++k) {
            float one[1] = {p[k]};
            store_state<DYNAMIC, true, 1>(tile.param, i + k * EACH, param, one, tile, a.seed, 0);
            p[k] = one[0];
        }
    } else {
        store_as<DYNAMIC, N, EACH>(tile.param, i, param, p, ToNearest{});
    }
    if (tile.copy) store_as<DYNAMIC, N, EACH>(tile.copy, i, tile.dtype(COPY_DTYPE), p, ToNearest{});
    if (a.zero_grads) {
        float zeros[N] = {};
        store_as<DYNAMIC, N, EACH>(tile.grad, i, tile.dtype(GRAD_DTYPE), zeros, ToNearest{});
    }
}

template <bool SR>
__global__ __launch_bounds__(THREADS, 3) void adafactor_apply_kernel(
    const __grid_constant__ AdafactorArguments a) {
    if (a.skips()) return;
    __shared__ FactorTile tile;
    __shared__ float row_roots[TILE_ROWS];
    for_tiles(a, tile, [&](int64_t) {
        for_updates(tile, row_roots, [&](int64_t i, int64_t left, float (&u)[OF_LANE]) {
            float p[OF_LANE];
            load_row(tile.master ? tile.master : tile.param, i,
                     tile.dtype(tile.master ? MASTER_DTYPE : PARAM_DTYPE), left, p);
#pragma unroll
            for (int k = 0; k < OF_LANE; ++k) p[k] = tile.rule.moved(p[k], u[k]);
            if (left == TILE_COLUMNS) return store_param<SR, OF_LANE, WARP>(tile, a, i, p);
#pragma unroll
            for (int k = 0; k < OF_LANE; ++k) {
                if (static_cast<int>(threadIdx.x % WARP) + k * WARP >= left) continue;
                float one[1] = {p[k]};
                store_param<SR, 1, 1>(tile, a, i + k * WARP, one);
            }
        });
    });
    if (!last_cta(ticket_of(a.table))) return;
    for (int r = threadIdx.x; r < a.rows; r += THREADS)
        if (r == 0 || column(a.table, r, STEP) != column(a.table, r - 1, STEP))
            *pointer<float>(a.table, r, STEP) += 1.0f;
}

}  // namespace pyops::cuda
