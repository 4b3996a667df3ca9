"""Segmentation, detection, audio, diffusion and models of several inputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from zoo.models.images import (
    dino_backbone,
    hgnet_backbone,
    image_draws,
    mit_backbone,
    resnet_backbone,
    vit_det_backbone,
)
from zoo.models.text import text_draws
from zoo.subject import Draw, Function, ints, of_keras, uniform

_STAGES: dict[str, Any] = {
    "stackwise_num_filters": [64, 64, 64, 64],
    "stackwise_num_blocks": [1, 1, 1, 1],
    "stackwise_num_strides": [1, 2, 2, 2],
}


def _of(network: Any, **draws: Draw) -> Function:
    images = {t.name: uniform(-1.0, 1.0) for t in network.inputs if "image" in t.name}
    return of_keras(network, {**text_draws(network), **images, **draws})


def _deeplab() -> Function:
    import keras_hub

    network = keras_hub.models.DeepLabV3Backbone(
        image_encoder=resnet_backbone(**_STAGES, image_shape=(64, 64, 3)),
        spatial_pyramid_pooling_key="P5",
        low_level_feature_key="P2",
        upsampling_size=8,
        dilation_rates=[2, 3],
        projection_filters=8,
        image_shape=(64, 64, 3),
    )
    return of_keras(network, image_draws(network))


def _segformer() -> Function:
    import keras_hub

    backbone = keras_hub.models.SegFormerBackbone(
        image_encoder=mit_backbone(), projection_filters=8
    )
    network = keras_hub.models.SegFormerImageSegmenter(backbone, num_classes=4)
    return of_keras(network, image_draws(network))


def _basnet() -> Function:
    import keras_hub

    network = keras_hub.models.BASNetBackbone(
        image_encoder=resnet_backbone(**_STAGES, image_shape=(None, None, 3)),
        num_classes=1,
        projection_filters=64,
        image_shape=(64, 64, 3),
    )
    return of_keras(network, image_draws(network))


def _retina_net() -> Function:
    import keras_hub

    network = keras_hub.models.RetinaNetBackbone(
        image_encoder=resnet_backbone(**_STAGES, image_shape=(64, 64, 3)),
        min_level=3,
        max_level=5,
        use_p5=False,
        use_fpn_batch_norm=True,
        image_shape=(64, 64, 3),
    )
    return of_keras(network, image_draws(network))


def _d_fine() -> Function:
    import keras_hub

    network = keras_hub.models.DFineBackbone(
        backbone=hgnet_backbone(affine=False),
        decoder_in_channels=[16, 16],
        encoder_hidden_dim=16,
        num_denoising=0,
        num_labels=4,
        hidden_dim=16,
        learn_initial_query=False,
        num_queries=6,
        anchor_image_size=(32, 32),
        feat_strides=[4, 8],
        num_feature_levels=2,
        encoder_in_channels=[16, 32],
        encode_proj_layers=[1],
        num_attention_heads=2,
        encoder_ffn_dim=16,
        num_encoder_layers=1,
        hidden_expansion=0.5,
        depth_multiplier=0.5,
        eval_idx=-1,
        num_decoder_layers=1,
        decoder_attention_heads=2,
        decoder_ffn_dim=16,
        decoder_n_points=[2, 2],
        lqe_hidden_dim=8,
        num_lqe_layers=2,
        out_features=["stage1", "stage2"],
        image_shape=(32, 32, 3),
        seed=0,
    )
    return of_keras(network, image_draws(network))


def _depth_anything() -> Function:
    import keras_hub

    network = keras_hub.models.DepthAnythingBackbone(
        image_encoder=dino_backbone(
            num_layers=4, use_mask_token=False, image_shape=(64, 64, 3)
        ),
        reassemble_factors=[4, 2, 1, 0.5],
        neck_hidden_dims=[8, 8, 8, 8],
        fusion_hidden_dim=8,
        head_hidden_dim=8,
        head_in_index=-1,
        feature_keys=["stage1", "stage2", "stage3", "stage4"],
    )
    return of_keras(network, image_draws(network))


def _sam() -> Function:
    import keras_hub

    network = keras_hub.models.SAMBackbone(
        image_encoder=vit_det_backbone(),
        prompt_encoder=keras_hub.layers.SAMPromptEncoder(
            hidden_size=8,
            image_embedding_size=(4, 4),
            input_image_size=(64, 64),
            mask_in_channels=16,
        ),
        mask_decoder=keras_hub.layers.SAMMaskDecoder(
            num_layers=1,
            hidden_size=8,
            intermediate_dim=16,
            num_heads=2,
            embedding_dim=8,
            num_multimask_outputs=2,
            iou_head_depth=2,
            iou_head_hidden_dim=8,
        ),
    )
    return _of(
        network,
        points=uniform(0.0, 64.0),
        boxes=uniform(0.0, 64.0),
        labels=ints(0, 2),
    )


_TOWER: dict[str, Any] = {
    "hidden_dim": 16,
    "num_layers": 1,
    "num_heads": 2,
    "intermediate_dim": 32,
}


def _clip() -> Function:
    import keras_hub

    models = keras_hub.models
    image = models.CLIPVisionEncoder(patch_size=8, image_shape=(32, 32, 3), **_TOWER)
    words = models.CLIPTextEncoder(
        vocabulary_size=50, embedding_dim=16, max_sequence_length=12, **_TOWER
    )
    return _of(models.CLIPBackbone(image, words, projection_dim=8))


def _siglip() -> Function:
    import keras_hub

    models = keras_hub.models
    image = models.SigLIPVisionEncoder(patch_size=8, image_shape=(32, 32, 3), **_TOWER)
    words = models.SigLIPTextEncoder(
        vocabulary_size=50, embedding_dim=16, max_sequence_length=12, **_TOWER
    )
    return _of(models.SigLIPBackbone(image, words))


def _pali_gemma() -> Function:
    import keras_hub

    network = keras_hub.models.PaliGemmaBackbone(
        vocabulary_size=50,
        image_size=16,
        num_layers=1,
        num_query_heads=2,
        num_key_value_heads=1,
        hidden_dim=16,
        intermediate_dim=32,
        head_dim=8,
        vit_patch_size=8,
        vit_num_heads=2,
        vit_hidden_dim=16,
        vit_num_layers=1,
        vit_intermediate_dim=32,
    )
    return _of(network)


def _parseq() -> Function:
    import keras_hub

    encoder = keras_hub.models.ViTBackbone(
        image_shape=(32, 32, 3),
        patch_size=(8, 8),
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        mlp_dim=32,
        use_class_token=False,
    )
    network = keras_hub.models.PARSeqBackbone(
        image_encoder=encoder,
        vocabulary_size=50,
        max_label_length=12,
        decoder_hidden_dim=16,
        num_decoder_layers=1,
        num_decoder_heads=2,
        decoder_mlp_dim=32,
    )
    return _of(network)


def _whisper() -> Function:
    import keras_hub

    network = keras_hub.models.WhisperBackbone(
        vocabulary_size=50,
        num_layers=1,
        num_heads=2,
        hidden_dim=16,
        intermediate_dim=32,
        num_mels=8,
        max_encoder_sequence_length=12,
        max_decoder_sequence_length=12,
    )
    return _of(network)


def _moonshine() -> Function:
    import keras_hub

    network = keras_hub.models.MoonshineBackbone(
        vocabulary_size=50,
        filter_dim=16,
        encoder_num_layers=1,
        decoder_num_layers=1,
        hidden_dim=16,
        intermediate_dim=32,
        encoder_num_heads=2,
        decoder_num_heads=2,
    )
    sound = {"encoder_input_values": 1600, "encoder_padding_mask": 1600}
    return of_keras(network, text_draws(network), sound)


def _vae() -> Function:
    from keras_hub.src.models.vae.vae_backbone import VAEBackbone

    network = VAEBackbone(
        encoder_num_filters=[32, 32],
        encoder_num_blocks=[1, 1],
        decoder_num_filters=[32, 32],
        decoder_num_blocks=[1, 1],
        sampler_method="mode",
        sample_channels=8,
    )
    sizes = {tensor.name: 16 for tensor in network.inputs}
    return of_keras(network, image_draws(network), sizes)


def _rq_vae() -> Function:
    from keras_hub.src.models.rqvae.rqvae_backbone import RQVAEBackbone

    network = RQVAEBackbone(
        input_dim=16,
        encoder_layer_dims=[12],
        output_dim=8,
        decoder_layer_dims=[12],
        num_embeddings=6,
        num_quantizers=2,
    )
    return of_keras(network)


def _stable_diffusion() -> Function:
    from keras_hub.src.models.stable_diffusion_3.mmdit import MMDiT

    network = MMDiT(
        patch_size=2,
        hidden_dim=16,
        num_layers=2,
        num_heads=2,
        position_size=8,
        qk_norm="rms_norm",
        dual_attention_indices=[0],
        latent_shape=(8, 8, 4),
        context_shape=(6, 16),
        pooled_projection_shape=(16,),
    )
    return of_keras(network, {"timestep": uniform(0.0, 1000.0)})


def _flux() -> Function:
    import keras_hub

    network = keras_hub.models.FluxBackbone(
        input_channels=8,
        hidden_size=16,
        mlp_ratio=2.0,
        num_heads=2,
        depth=1,
        depth_single_blocks=1,
        axes_dim=[2, 2, 4],
        theta=10000,
        use_bias=True,
        image_shape=(6, 8),
        text_shape=(4, 16),
        image_ids_shape=(6, 3),
        text_ids_shape=(4, 3),
        y_shape=(16,),
    )
    return of_keras(network)


BUILDERS: dict[str, Callable[[], Function]] = {
    "DeepLabV3": _deeplab,
    "SegFormer": _segformer,
    "BASNet": _basnet,
    "RetinaNet": _retina_net,
    "D-FINE": _d_fine,
    "DepthAnything": _depth_anything,
    "SAM": _sam,
    "CLIP": _clip,
    "SigLIP": _siglip,
    "PaliGemma": _pali_gemma,
    "PARSeq": _parseq,
    "Whisper": _whisper,
    "Moonshine": _moonshine,
    "VAE": _vae,
    "RQ-VAE": _rq_vae,
    "MMDiT": _stable_diffusion,
    "Flux": _flux,
}
