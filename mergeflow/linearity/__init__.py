"""Cross-task linearity: are the features of combined weights the combination of the models' features?"""
