/* A C client: stores a model, takes it back, and compares. */
#include "gshare_store.h"
#include <stdio.h>
#include <string.h>

_Static_assert(sizeof(gshare_tensor) == 96, "the tensor of the library");

#define CHECK(what) do { if (!(what)) { fprintf(stderr, "%s: %s\n", #what, error); return 1; } } while (0)

int main(int count, char **arguments) {
    char error[200] = "";
    if (count < 2) return 2;
    gshare_store *store = gshare_store_connect(arguments[1], error, sizeof error);
    CHECK(store != NULL);
    const float values[6] = {1, 2, 3, 4, 5, 6};
    const uint64_t shape[2] = {2, 3};
    gshare_tensor tensor = {.name = "w", .name_bytes = 1, .shape = shape, .rank = 2, .data = (const uint8_t *)values,
                            .bytes = sizeof values, .dtype = 12};
    CHECK(gshare_store_put(store, "m", GSHARE_ACCESS_PUBLIC, &tensor, 1, error, sizeof error) == 0);
    CHECK(gshare_store_put(store, "m", GSHARE_ACCESS_PUBLIC, &tensor, 1, error, sizeof error) == 3);
    CHECK(strstr(error, "taken") != NULL);
    tensor.bytes = 5;
    CHECK(gshare_store_put(store, "n", GSHARE_ACCESS_PUBLIC, &tensor, 1, error, sizeof error) == GSHARE_ERROR_ARGUMENT);
    CHECK(gshare_store_get(store, "nothing", GSHARE_TIER_HOST, 0, error, sizeof error) == NULL);
    gshare_model *model = gshare_store_get(store, "m", GSHARE_TIER_HOST, 1000, error, sizeof error);
    CHECK(model != NULL);
    uint64_t bytes = 1;
    CHECK(gshare_store_arena_bytes(store, GSHARE_TIER_HOST, &bytes, error, sizeof error) == 0 && bytes == 2 << 20);
    CHECK(gshare_store_arena_bytes(store, GSHARE_TIER_GPU, &bytes, error, sizeof error) == 0 && bytes == 0);
    CHECK(gshare_store_arena_bytes(store, 7, &bytes, error, sizeof error) == GSHARE_ERROR_ARGUMENT);
    gshare_store_close(store);
    CHECK(gshare_model_open(NULL, error, sizeof error) == GSHARE_ERROR_ARGUMENT);
    CHECK(gshare_model_open(model, error, sizeof error) == 0);
    CHECK(gshare_model_tensors(model) == 1 && gshare_model_bytes(model) == 2 << 20);
    gshare_tensor got;
    CHECK(gshare_model_tensor(model, 0, &got) == 0);
    CHECK(gshare_model_tensor(model, 1, &got) == GSHARE_ERROR_ARGUMENT);
    CHECK(got.rank == 2 && got.shape[1] == 3 && got.bytes == sizeof values && got.dtype == 12);
    CHECK(memcmp(got.data, values, sizeof values) == 0 && (size_t)got.data % 256 == 0);
    CHECK(gshare_model_descriptor(model) >= 0);
    gshare_model_release(model);
    return 0;
}
