"""Image backbones of keras_hub, as small as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zoo.subject import Draw, Function, of_keras, uniform

_SHAPE = (32, 32, 3)


def image_draws(network: Any) -> dict[str, Draw]:
    """Draw every input between -1 and 1."""
    return {tensor.name: uniform(-1.0, 1.0) for tensor in network.inputs}


def _of(name: str, **config: Any) -> Function:
    import keras_hub

    network = getattr(keras_hub.models, name)(**config)
    return of_keras(network, image_draws(network))


def resnet_backbone(**config: Any) -> Any:
    """Make a ResNet of two stages."""
    import keras_hub

    settings: dict[str, Any] = {
        "input_conv_filters": [64],
        "input_conv_kernel_sizes": [3],
        "stackwise_num_filters": [64, 64],
        "stackwise_num_blocks": [1, 1],
        "stackwise_num_strides": [1, 2],
        "block_type": "basic_block",
        "image_shape": _SHAPE,
    }
    return keras_hub.models.ResNetBackbone(**(settings | config))


def _resnet() -> Function:
    network = resnet_backbone()
    return of_keras(network, image_draws(network))


def _resnet_d() -> Function:
    network = resnet_backbone(
        input_conv_filters=[8, 8, 64],
        input_conv_kernel_sizes=[3, 3, 3],
        block_type="bottleneck_block_vd",
    )
    return of_keras(network, image_draws(network))


def _cspnet() -> Function:
    return _of(
        "CSPNetBackbone",
        stem_filters=8,
        stem_kernel_size=3,
        stem_strides=1,
        stackwise_depth=[1, 1],
        stackwise_strides=[1, 2],
        stackwise_num_filters=[8, 16],
        block_type="dark_block",
        stage_type="dark",
        image_shape=_SHAPE,
    )


def _densenet() -> Function:
    return _of(
        "DenseNetBackbone",
        stackwise_num_repeats=[2, 2],
        growth_rate=8,
        image_shape=_SHAPE,
    )


def _efficientnet() -> Function:
    return _of(
        "EfficientNetBackbone",
        stackwise_width_coefficients=[1.0, 1.0],
        stackwise_depth_coefficients=[1.0, 1.0],
        stackwise_kernel_sizes=[3, 3],
        stackwise_num_repeats=[1, 1],
        stackwise_input_filters=[8, 8],
        stackwise_output_filters=[8, 16],
        stackwise_expansion_ratios=[2, 2],
        stackwise_squeeze_and_excite_ratios=[0.0, 0.25],
        stackwise_strides=[1, 2],
        stackwise_block_types=["fused", "unfused"],
        stackwise_force_input_filters=[0, 0],
        stackwise_nores_option=[False, False],
        num_features=32,
        input_shape=_SHAPE,
    )


def hgnet_backbone(affine: bool = True) -> Any:
    """Make an HGNetV2 of two stages."""
    import keras_hub

    return keras_hub.models.HGNetV2Backbone(
        depths=[1, 1],
        embedding_size=8,
        hidden_sizes=[16, 32],
        stem_channels=[3, 8, 8],
        hidden_act="relu",
        use_learnable_affine_block=affine,
        stackwise_stage_filters=[(8, 8, 16, 1, 2, 3), (16, 8, 32, 1, 2, 3)],
        apply_downsample=[False, True],
        use_lightweight_conv_block=[False, True],
        image_shape=_SHAPE,
        out_features=["stage1", "stage2"],
    )


def _hgnet() -> Function:
    network = hgnet_backbone()
    return of_keras(network, image_draws(network))


def mit_backbone() -> Any:
    """Make a Mix Transformer of two stages."""
    import keras_hub

    return keras_hub.models.MiTBackbone(
        layerwise_depths=[1, 1],
        num_layers=2,
        layerwise_num_heads=[1, 2],
        layerwise_sr_ratios=[2, 1],
        max_drop_path_rate=0.1,
        layerwise_patch_sizes=[7, 3],
        layerwise_strides=[4, 2],
        image_shape=_SHAPE,
        hidden_dims=[8, 16],
    )


def _mit() -> Function:
    network = mit_backbone()
    return of_keras(network, image_draws(network))


def _mobilenet() -> Function:
    return _of(
        "MobileNetBackbone",
        stackwise_expansion=[[16, 24], [24]],
        stackwise_num_blocks=[2, 1],
        stackwise_num_filters=[[8, 8], [16]],
        stackwise_kernel_size=[[3, 3], [5]],
        stackwise_num_strides=[[2, 1], [2]],
        stackwise_se_ratio=[[None, None], [0.25]],
        stackwise_activation=[["relu", "relu"], ["hard_swish"]],
        stackwise_padding=[[1, 1], [2]],
        output_num_filters=32,
        depthwise_filters=8,
        depthwise_stride=1,
        depthwise_residual=False,
        last_layer_filter=32,
        squeeze_and_excite=0.5,
        image_shape=_SHAPE,
    )


def _mobilenet_v5() -> Function:
    zeros = [[0], [0, 0]]
    return _of(
        "MobileNetV5Backbone",
        stackwise_block_types=[["er"], ["uir", "uir"]],
        stackwise_num_blocks=[1, 2],
        stackwise_num_filters=[[8], [16, 16]],
        stackwise_strides=[[2], [2, 1]],
        stackwise_act_layers=[["relu"], ["relu", "relu"]],
        stackwise_exp_ratios=[[2.0], [3.0, 3.0]],
        stackwise_se_ratios=[[0.0], [0.0, 0.0]],
        stackwise_dw_kernel_sizes=[[0], [5, 5]],
        stackwise_dw_start_kernel_sizes=zeros,
        stackwise_dw_end_kernel_sizes=zeros,
        stackwise_exp_kernel_sizes=[[3], [0, 0]],
        stackwise_pw_kernel_sizes=[[1], [0, 0]],
        stackwise_num_heads=zeros,
        stackwise_key_dims=zeros,
        stackwise_value_dims=zeros,
        stackwise_kv_strides=zeros,
        stackwise_use_cpe=[[False], [False, False]],
        use_msfa=False,
        image_shape=_SHAPE,
    )


def _vgg() -> Function:
    return _of(
        "VGGBackbone",
        stackwise_num_repeats=[1, 1],
        stackwise_num_filters=[8, 16],
        image_shape=_SHAPE,
    )


def _xception() -> Function:
    return _of(
        "XceptionBackbone",
        stackwise_conv_filters=[[8, 8], [16, 16]],
        stackwise_pooling=[True, False],
        image_shape=_SHAPE,
    )


_VIT: dict[str, Any] = {
    "image_shape": _SHAPE,
    "patch_size": 8,
    "num_layers": 2,
    "num_heads": 2,
    "hidden_dim": 16,
}


def _vit() -> Function:
    return _of("ViTBackbone", mlp_dim=32, **_VIT)


def _deit() -> Function:
    return _of("DeiTBackbone", intermediate_dim=32, **_VIT)


def dino_backbone(**config: Any) -> Any:
    """Make a DINOv2."""
    import keras_hub

    return keras_hub.models.DINOV2Backbone(
        intermediate_dim=32, position_embedding_shape=_SHAPE, **(_VIT | config)
    )


def _dino_v2() -> Function:
    network = dino_backbone(use_mask_token=False)
    return of_keras(network, image_draws(network))


def _dino_v3() -> Function:
    return _of(
        "DINOV3Backbone",
        intermediate_dim=32,
        use_mask_token=False,
        **(_VIT | {"hidden_dim": 32}),
    )


def vit_det_backbone() -> Any:
    """Make the image encoder of SAM."""
    import keras_hub

    return keras_hub.models.ViTDetBackbone(
        hidden_size=16,
        num_layers=2,
        intermediate_dim=32,
        num_heads=2,
        global_attention_layer_indices=[1],
        image_shape=(64, 64, 3),
        patch_size=16,
        num_output_channels=8,
        window_size=2,
    )


def _vit_det() -> Function:
    network = vit_det_backbone()
    return of_keras(network, image_draws(network))


def _swin() -> Function:
    return _of(
        "SwinTransformerBackbone",
        image_shape=_SHAPE,
        embed_dim=8,
        depths=(2, 2),
        num_heads=(2, 2),
        window_size=4,
        patch_size=2,
    )


def _video_prism() -> Function:
    return _of(
        "VideoPrismBackbone",
        num_frames=2,
        patch_size=8,
        hidden_dim=16,
        intermediate_dim=32,
        num_heads=2,
        num_spatial_layers=1,
        num_temporal_layers=1,
        num_auxiliary_layers=0,
        image_shape=_SHAPE,
    )


BUILDERS: dict[str, Callable[[], Function]] = {
    "ResNet": _resnet,
    "ResNetVD": _resnet_d,
    "CSPNet": _cspnet,
    "DenseNet": _densenet,
    "EfficientNet": _efficientnet,
    "HGNetV2": _hgnet,
    "MiT": _mit,
    "MobileNetHub": _mobilenet,
    "MobileNetV5": _mobilenet_v5,
    "VGG": _vgg,
    "XceptionHub": _xception,
    "ViT": _vit,
    "DeiT": _deit,
    "DINOv2": _dino_v2,
    "DINOv3": _dino_v3,
    "ViTDet": _vit_det,
    "Swin": _swin,
    "VideoPrism": _video_prism,
}
