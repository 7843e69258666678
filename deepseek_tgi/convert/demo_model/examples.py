"""Questions answered as they should be: the teacher sees two or three before each prompt, and answers in their manner."""

from __future__ import annotations

Pairs = tuple[tuple[str, str], ...]

ANSWERS: dict[str, Pairs] = {
    "define": (
        ("What is a ladder?", "A ladder is a tool with two long sides and many steps. People climb it to reach high places."),
        ("What is a bucket?", "A bucket is a deep, round container with a handle. People use it to carry water or sand."),
        ("What is an oven used for?", "An oven is used for baking bread, cakes, and other food. It heats the food from all sides."),
        ("Tell me about umbrellas.", "An umbrella keeps people dry when it rains. It has a handle and a round cloth that opens and closes."),
        ("What is thunder?", "Thunder is the loud sound that follows lightning. The lightning heats the air very quickly, and the air makes a boom."),
        ("Explain what a magnet is.", "A magnet is a piece of metal that pulls iron toward itself. People use magnets in motors and on refrigerator doors."),
        ("How does a clock work?", "A clock has small wheels that turn at a steady speed. The wheels move the hands, and the hands show the time."),
        ("Why is clean air important?", "Clean air is important because all people and animals breathe it. Dirty air can make them sick."),
    ),
    "why": (
        ("Why do people wear gloves?", "People wear gloves to keep their hands warm and clean. Gloves also protect the hands during hard work."),
        ("Why do we cook food?", "We cook food to make it soft, tasty, and safe to eat. Heat kills germs that could make us sick."),
        ("Why is the grass green?", "Grass is green because it contains chlorophyll. Plants use chlorophyll to turn sunlight into food."),
        ("Why do dogs wag their tails?", "Dogs wag their tails to show how they feel. A happy dog often wags its whole body."),
    ),
    "how": (
        ("How do I make toast?", "Put a slice of bread in the toaster and press the lever. Wait until it is brown, and then spread some butter on it."),
        ("How can I learn to spell better?", "Read a little every day and write down the words that you find hard. Then practice them until you know them."),
        ("Give me three tips for waking up early.", "First, go to bed at the same time every night. Second, put your alarm clock far from your bed. Third, drink a glass of water when you get up."),
        ("What do I need to draw a picture?", "You need a sheet of paper and a pencil. Colored pencils and an eraser are useful too."),
        ("Is it hard to learn to knit?", "It is not hard, but it takes practice. Start with a simple scarf and be patient with yourself."),
        ("What are the benefits of walking?", "Walking keeps your heart healthy and your mind clear. It costs nothing, and you can do it almost anywhere."),
    ),
    "describe": (
        ("Describe a busy harbor.", "The harbor is full of ships and small boats. Sailors shout and carry heavy boxes. Gulls fly above the water, and the air smells of salt and fish."),
        ("Write a few sentences about the first snow.", "The first snow fell in the night. In the morning the whole street was white and quiet. Children ran outside and made small snowballs."),
        ("Describe an old chair.", "The old chair stands by the window. Its wood is dark, and one of its legs is shorter than the others. It creaks when somebody sits on it."),
        ("Write a short paragraph about a nurse who works at night.", "Mrs. Hill is a nurse, and she works while the city sleeps. She walks softly from bed to bed. When a patient is afraid, she sits down and holds his hand."),
    ),
    "sentence": (
        ("Write a sentence with the word river.", "We sat by the river and watched the boats go by."),
        ("Use the word coat in a sentence.", "She hung her wet coat next to the fire."),
        ("Make a sentence about an apple.", "He cut the apple in half and gave me the bigger piece."),
    ),
    "feel": (
        ("I feel cold.", "Then put on a warm sweater and drink something hot. You will feel better soon."),
        ("I am so jealous.", "Everyone feels jealous sometimes. Try to think of the good things that you have, and talk to a friend about it."),
        ("What can I do when I feel shy?", "Start with a smile and a short greeting. Most people are friendly, and it gets easier every time."),
    ),
    "animal": (
        ("What is a hawk?", "A hawk is a bird with sharp eyes and strong claws. It hunts mice and other small animals."),
        ("What do rabbits eat?", "Rabbits eat grass, leaves, and vegetables. They like fresh hay most of all."),
        ("Where do frogs live?", "Frogs live near ponds, rivers, and wet forests. They need water to lay their eggs."),
        ("Tell me a fact about ants.", "An ant can carry things that are many times heavier than its own body."),
    ),
    "job": (
        ("What does a gardener do?", "A gardener takes care of plants. He waters the flowers, cuts the grass, and pulls out the weeds."),
        ("What is a potter?", "A potter is a person who makes cups, bowls, and pots from clay."),
        ("Where does a waiter work?", "A waiter works in a restaurant or a cafe. He brings food and drinks to the guests."),
    ),
    "compare": (
        ("What is the difference between a lake and a sea?", "A lake is surrounded by land, and its water is usually fresh. A sea is much larger, and its water is salty."),
        ("What is the difference between a spoon and a fork?", "A spoon is round and holds soup. A fork has sharp points and picks up solid food."),
        ("What is the difference between a duck and a hen?", "A duck swims on water and has wide feet. A hen lives on land and cannot swim."),
    ),
    "poem": (
        ("Write a short poem about a star.", "Little star above the hill,\nAll the world is dark and still.\nShine upon my window light,\nKeep me company tonight."),
        ("Write a short poem about rain.", "Rain is tapping on the glass,\nRain is falling on the grass.\nWhen the clouds have gone away,\nWe will all go out and play."),
    ),
}  # fmt: skip

STORIES: Pairs = (
    ("Write a short story about Lena, a small duck who loses a button.", "Lena was a small duck who lived by the pond. She had a coat with a shiny blue button. One day the button was gone, and Lena began to cry. Her friend the frog heard her and asked what was wrong. They looked under the leaves and behind the stones. At last the frog found the button in the mud. Lena washed it and sewed it back on. She thanked the frog and gave him half of her cake."),
    ("Write a short story about a potter and a crow.", "An old potter lived at the edge of the town. Every morning a crow sat on his fence and watched him work. One day the potter broke his best bowl, and he sat down and sighed. The crow flew away and came back with a bright piece of glass. The potter laughed and pressed the glass into the wet clay. It became the most beautiful bowl in the shop. From that day on, the crow always got the first crumb of bread."),
    ("Tell me a story about Rolf, a young hare who wants a lantern.", "Rolf was a young hare who did not like the dark. He wanted a lantern so that he could walk home at night. His mother had no money, but she knew what to do. They filled a glass jar with fireflies and tied a string around it. The jar glowed softly, and Rolf could see every stone on the path. When he came home, he opened the jar and let the fireflies go. After that night, the dark did not seem so big."),
    ("Write a short story about a rainy harbor.", "It rained all day in the little harbor. The fishermen stayed at home, and the boats rocked in the wind. Only Marta walked along the water in her yellow boots. Near the last boat she heard a soft cry. A wet kitten sat in a box and shook with cold. Marta put it under her coat and carried it home. Her father warmed some milk, and soon the kitten was asleep by the stove."),
    ("Tell me a bedtime story about a tired train.", "Once there was a little train that pulled heavy wagons over the hills. One evening the train was so tired that it stopped in the middle of a field. The moon looked down and asked what was the matter. The train said that the last hill was too high. The moon smiled and lit up the whole track. Then the train took a deep breath and rolled slowly to the top. It slept in its warm shed all night long."),
    ("Write a story about a goat and a heron who become friends.", "A goat came to the river every day to drink. A heron stood in the water and never said a word. One day the goat slipped and fell into the river. The heron pushed a long branch toward her, and she climbed out. The goat shook the water from her coat and said thank you. After that, she brought the heron fresh clover, and they talked until the sun went down."),
)  # fmt: skip
