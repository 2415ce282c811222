// What is wrong is a status and a sentence, also in C.
#include <gemmesh.h>
#include <stdio.h>

static int failures;

// Checks that a call is refused, with a sentence that has these words.
static void refused(gemmesh_status status, const char *words) {
    if (status == GEMMESH_ERROR_ARGUMENT && strstr(gemmesh_last_error(), words)) return;
    fprintf(stderr, "status %u, \"%s\" has no \"%s\"\n", (unsigned)status, gemmesh_last_error(), words);
    failures++;
}

static void run_with(gemmesh_group *group) {
    gemmesh_product product = gemmesh_product_default(GEMMESH_MATMUL, GEMMESH_BF16);
    gemmesh_product_call call = gemmesh_product_call_default();
    refused(gemmesh_run(group, NULL, &call), "the pointer of the product is null");
    refused(gemmesh_run(group, &product, NULL), "the pointer of the call is null");
    refused(gemmesh_run(group, &product, &call), "the pointer of a is null");
    call.struct_size--;
    refused(gemmesh_run(group, &product, &call), "struct_size of the call");
    product.activation = (gemmesh_activation)1234;
    refused(gemmesh_run(group, &product, &call), "is 1234");
}

int main(void) {
    gemmesh_group_options options = gemmesh_group_options_default();
    gemmesh_group *group;
    refused(gemmesh_barrier(NULL), "the handle of group is null");
    refused(gemmesh_barrier((gemmesh_group *)&options), "no handle of this kind");
    if (gemmesh_group_connect(0, 1, "misuse", &options, &group) != GEMMESH_OK) {
        fprintf(stderr, "%s\n", gemmesh_last_error());
        return 1;
    }
    run_with(group);
    uint16_t values[4] = {0};
    gemmesh_memory memory = {values, GEMMESH_BF16, 2, 2, 0};
    refused(gemmesh_copy_from_host(group, &memory, values, 7), "is 7 and must be 8");
    memory.pitch = 2;
    refused(gemmesh_copy_from_host(group, &memory, values, 8), "the pitch of");
    refused(gemmesh_copy_from_host(group, &memory, NULL, 8), "the pointer of from is null");
    if (gemmesh_group_free(group) != GEMMESH_OK) failures++;
    refused(gemmesh_group_free(group), "freed or never given");
    refused(gemmesh_synchronize(group), "freed or never given");
    return failures != 0;
}
