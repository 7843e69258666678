"""The word lists that prompts and sentences are filled from: plain English, a few hundred words a kind."""

from __future__ import annotations


def _words(text: str) -> tuple[str, ...]:
    return tuple(text.split())


def _phrases(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.replace("\n", " ").split(","))


GIRLS = _words(
    "Anna Mia Lily Emma Rosa Sara Lucy Ella Nina Clara Ruby Maya Zoe Ada Grace Ivy Jane Kate Leah Molly Nora Olive "
    "Penny Rita Sophie Tess Wendy Amy Beth Daisy Eva Fiona Hannah Iris Julia Lena Maria Paula Vera Alice"
)
BOYS = _words(
    "Tom Ben Max Sam Leo Jack Tim Oscar Paul Henry Luke Adam Noah Felix Hugo Peter Dan Eli Finn George Ian Jim Kevin "
    "Liam Mark Nick Owen Ralph Simon Theo Victor Will Alex Bob Carl David Fred Harry John Martin"
)
ANIMALS = _words(
    "cat dog rabbit fox bear mouse owl duck frog horse pony goat sheep lamb pig hen squirrel hedgehog deer turtle "
    "elephant lion tiger monkey penguin wolf badger beaver otter crow robin sparrow donkey kitten puppy bee snail "
    "crab whale dolphin seal parrot camel giraffe zebra kangaroo koala panda swan goose"
)
MORE_ANIMALS = _words(
    "ant spider butterfly shark eagle hawk bat snake lizard crocodile hippopotamus rhinoceros gorilla cheetah leopard "
    "moose reindeer hamster salmon octopus jellyfish starfish worm moth wasp fly pigeon turkey peacock flamingo "
    "ostrich rat mole raccoon skunk buffalo cow bull chicken rooster caterpillar ladybug cricket"
)
PEOPLE = _words(
    "baker farmer teacher doctor nurse sailor painter gardener fisherman carpenter tailor librarian pilot driver "
    "singer dancer writer cook shopkeeper postman shoemaker clockmaker grandmother grandfather king queen prince "
    "princess knight shepherd miller"
)
JOBS = _words(
    "teacher doctor nurse baker farmer pilot sailor painter gardener carpenter tailor librarian plumber electrician "
    "mechanic dentist lawyer judge engineer scientist chef waiter musician singer actor dancer writer journalist "
    "photographer architect builder firefighter soldier butcher florist hairdresser cashier accountant programmer "
    "veterinarian pharmacist translator astronaut detective miner fisherman postman coach referee tailor surgeon "
    "secretary manager designer shepherd blacksmith jeweler"
)
PLACES = _words(
    "forest garden village city town beach farm school library market kitchen park museum harbor castle mountain "
    "valley river lake island desert meadow bakery hospital station airport bridge cave orchard field street square "
    "church theater zoo stable barn attic cellar workshop playground cottage lighthouse bookshop cafe restaurant "
    "bedroom classroom office factory pond waterfall jungle"
)
THINGS = _words(
    "bridge lamp table chair book clock key door window spoon fork knife cup plate bottle basket bag box hat coat "
    "shoe sock glove scarf umbrella mirror candle pillow blanket bed sofa carpet curtain shelf ladder hammer nail saw "
    "rope bucket broom brush comb soap towel needle thread button zipper belt ring necklace watch camera radio "
    "telephone computer television keyboard printer bicycle car bus train boat ship airplane helicopter rocket "
    "tractor truck wheel engine battery magnet compass map globe telescope microscope thermometer ruler pencil pen "
    "eraser notebook envelope stamp letter newspaper magazine dictionary calendar drum guitar piano violin flute "
    "trumpet bell whistle kite ball doll puzzle balloon tent backpack flashlight lantern stove oven refrigerator "
    "kettle pot pan toaster blender sink bathtub shower toilet fence gate roof wall chimney stairs elevator tunnel "
    "road tower dam windmill well anchor sail oar net trap nest cage leash saddle flag coin wallet ticket passport "
    "crown sword shield statue painting vase flower tree leaf root seed branch mushroom cloud rainbow star planet moon "
    "volcano island river mountain valley glacier waterfall storm tornado snowflake shadow mask costume robot toy "
    "swing slide seesaw sandcastle snowman sled ski skateboard helmet whip crayon paintbrush canvas sculpture"
)
FOODS = _words(
    "apple banana orange lemon pear peach plum cherry grape strawberry carrot potato tomato onion cucumber pumpkin "
    "sandwich cake cookie pie pancake omelette salad pizza burger noodle sausage egg"
)
STUFF = _words(
    "water ice snow rain wind fire smoke sand salt sugar honey milk butter cheese bread rice tea coffee chocolate "
    "soup pasta paper glass wood iron gold silver copper plastic rubber leather wool cotton silk stone clay oil gas "
    "steam air light sound heat electricity gravity energy music art poetry history geography mathematics science "
    "biology chemistry physics medicine language grammar weather time money trade friendship love courage patience "
    "kindness honesty happiness sadness anger fear hope trust luck wisdom freedom peace justice democracy education "
    "health sleep exercise nutrition pollution recycling farming fishing hunting cooking painting swimming reading "
    "writing dancing singing gardening travel traffic soccer basketball tennis chess software programming"
)
TOPICS = _phrases(
    "the moon, the sun, the sea, the rain, the snow, the wind, spring, summer, autumn, winter, the night, the morning, "
    "a quiet evening, the stars, the clouds, a storm, the forest, a river, a garden, a birthday, a holiday, a journey, "
    "a new friend, an old house, a small town, a busy street, a family dinner, a picnic, a school day, a rainy day, "
    "a lost toy, a secret door, a brave child, a kind neighbor, an old tree, a train ride, a trip to the beach, "
    "a walk in the park, a visit to the zoo, the first day of school, a good book, a favorite song, a warm fire, "
    "a long winter, a cold morning, the harvest, the market, a wedding, a surprise, a dream, home, friendship, courage, "
    "kindness, patience, hope, music, dancing, bread, honey, tea, apples, flowers, birds, fish, horses, cats, dogs"
)
ACTIVITIES = _phrases(
    "bake bread, make a cup of tea, boil an egg, cook rice, make soup, make a sandwich, wash the dishes, "
    "clean my room, fold a shirt, iron a shirt, sew on a button, plant a tree, grow tomatoes, water a plant, "
    "build a birdhouse, paint a wall, hang a picture, fix a bicycle, change a light bulb, light a fire, fly a kite, "
    "build a sandcastle, make a snowman, learn to swim, learn to ride a bicycle, learn a new language, learn to cook, "
    "learn to draw, learn to dance, play chess, play the piano, play the guitar, play soccer, sing better, "
    "write a letter, write a story, write a poem, read more books, remember new words, study for a test, "
    "do my homework, give a speech, make new friends, help a friend, say sorry, stay calm, sleep better, wake up early, "
    "eat healthy food, drink more water, stay healthy, stay warm in winter, stay cool in summer, keep fit, run faster, "
    "start jogging, save money, plan a trip, pack a suitcase, read a map, take a good photo, take care of a cat, "
    "take care of a dog, feed the birds, train a puppy, clean a fish tank, wash a car, wrap a present, "
    "plan a birthday party, set the table, write a shopping list, choose a good book, save energy, save water, "
    "recycle paper, reduce waste, protect nature, be a good listener, be more patient, be polite, solve a problem, "
    "make a decision, stop worrying, cheer up a friend, find a job, prepare for an interview, use a computer, "
    "write an email, learn to program, stay safe on the internet, cross the street safely, treat a small cut"
)
WHY = _phrases(
    "do people sleep, do birds fly south in winter, is the sky blue, do leaves fall in autumn, do we need water, "
    "do we need food, do we dream, do cats purr, do dogs bark, do bees make honey, do plants need light, "
    "do we brush our teeth, do we wash our hands, do people read books, do people listen to music, do children play, "
    "do we have seasons, is the sea salty, does it rain, does ice melt, does wood float, do we laugh, do we cry, "
    "do people work, do people travel, do people keep pets, is exercise important, is sleep important, "
    "is reading important, is friendship important, is honesty important, is it good to share, is breakfast important, "
    "do we recycle, do we wear coats in winter, do we have two eyes, do people live in houses, do people learn languages, "
    "do people go to school, do farmers grow food, do spiders make webs, do birds sing, do fish live in water, "
    "do bears sleep in winter, are trees important, is the sun important, is the moon bright, does the wind blow, "
    "do we say thank you, do people celebrate birthdays, do people dance, do people tell stories, do clocks tick, "
    "is it cold in winter, is it hot in summer, do we use money, do ships float, do airplanes fly, do magnets stick"
)
FEELINGS = _words(
    "happy sad tired bored lonely angry nervous excited worried scared proud sick hungry thirsty sleepy confused "
    "grateful hopeful calm stressed"
)
ADJECTIVES = _words(
    "small big old young kind shy brave clever curious gentle lazy hungry sleepy happy lonely tired quiet funny proud "
    "friendly careful silly wise cheerful little grumpy playful patient busy honest"
)
LOOKS = _words(
    "small quiet old busy sunny snowy rainy windy foggy warm cold dark bright beautiful tiny huge empty crowded peaceful "
    "lovely colorful dusty cozy"
)
OBJECTS = _phrases(
    "a red kite, a golden key, a lost kitten, a wooden boat, an old map, a shiny coin, a blue balloon, a broken toy, "
    "a silver bell, a small lantern, a secret letter, a warm scarf, a magic seed, a big pumpkin, a little drum, "
    "a green hat, a strange egg, a hidden door, a bright star, a lost ring, a paper crown, an old clock, a tiny mouse, "
    "a basket of apples, a jar of honey, a yellow umbrella, a music box, a smooth stone, a ball of wool, a wooden horse"
)
EVENTS = _phrases(
    "finds {}, loses {}, wants {}, shares {}, builds a house for {}, dreams about {}, looks for {}, gets {}, "
    "fixes {}, makes {}, gives {} to a friend, hides {}, sees {} in the river, buys {} at the market"
)
