"""What common things are, by hand: `thing: kind; use` becomes several questions with one sentence or two of answer."""

from __future__ import annotations

import random

_TABLE = """
bridge: a structure that crosses a river or a road; People and cars use it to get to the other side.
lamp: a thing that gives light; People turn it on when it is dark.
table: a piece of furniture with a flat top and legs; People eat and work at it.
chair: a piece of furniture with a seat and a back; People sit on it.
book: many pages that are bound together; People read it to learn something or to enjoy a story.
clock: a device that shows the time; Its hands or numbers tell the hour and the minute.
key: a small piece of metal that opens a lock; People use it to open and close doors.
door: a flat piece of wood or metal that opens and closes; It lets people into a room or a house.
window: an opening in a wall with glass in it; It lets light and air into a room.
spoon: a tool with a small round bowl and a handle; People eat soup with it.
fork: a tool with sharp points and a handle; People use it to pick up food.
knife: a tool with a sharp blade; People cut bread and other food with it.
cup: a small round container with a handle; People drink tea or coffee from it.
plate: a flat dish; People put food on it.
bottle: a tall container with a narrow neck; It holds water, milk, or juice.
basket: a container that is made of thin pieces of wood; People carry fruit and bread in it.
hat: a piece of clothing for the head; It keeps the head warm or gives shade.
coat: a warm piece of clothing with long sleeves; People wear it outside in cold weather.
shoe: a covering for the foot; It protects the foot when people walk.
umbrella: a round cloth on a stick that opens and closes; It keeps people dry in the rain.
mirror: a piece of glass that shows your own face; People look into it when they comb their hair.
candle: a stick of wax with a string in the middle; It gives light when it burns.
pillow: a soft cushion for the head; People rest their heads on it when they sleep.
blanket: a large piece of warm cloth; It keeps people warm in bed.
bed: a piece of furniture for sleeping; It has a soft mattress and a pillow.
hammer: a tool with a heavy metal head; People use it to drive nails into wood.
saw: a tool with a long blade and sharp teeth; People cut wood with it.
rope: a thick and strong string; People use it to tie or pull heavy things.
broom: a brush with a long handle; People sweep the floor with it.
soap: a thing that cleans the skin when it is used with water; People wash their hands with it.
towel: a piece of soft cloth; People use it to dry their hands and bodies.
needle: a thin piece of metal with a sharp point; People sew clothes with a needle and thread.
ring: a small circle of metal; People wear it on a finger.
camera: a device that takes pictures; People use it to keep memories.
radio: a device that plays sounds sent through the air; People listen to music and news on it.
telephone: a device that carries voices over a long distance; People use it to talk to others who are far away.
television: a device with a screen that shows moving pictures; People watch films and news on it.
bicycle: a vehicle with two wheels and pedals; People ride it by pushing the pedals with their feet.
car: a vehicle with four wheels and an engine; People drive it on roads.
bus: a large vehicle that carries many people; People ride it to work or to school.
train: a long vehicle that runs on rails; It carries people and goods from city to city.
boat: a small vehicle that floats on water; People use it to cross a lake or to catch fish.
ship: a very large boat; It carries people and goods across the sea.
airplane: a vehicle with wings that flies through the air; It carries people quickly to places that are far away.
rocket: a machine that flies into space; It burns fuel and pushes hot gas out behind it.
map: a drawing that shows a place from above; People use it to find their way.
compass: a small device with a needle that points north; Sailors and hikers use it to find their way.
pencil: a thin stick of wood with a gray core; People write and draw with it.
pen: a tool that writes with ink; People sign letters with it.
letter: a written message on paper; People send it to others by mail.
newspaper: a set of printed pages with news; People read it to learn what happened in the world.
dictionary: a book that explains the meaning of words; People use it when they do not know a word.
calendar: a list of the days, weeks, and months of a year; People use it to plan their time.
guitar: a musical instrument with six strings; People play it with their fingers.
piano: a large musical instrument with black and white keys; A player presses the keys to make music.
violin: a musical instrument with four strings; A player moves a bow across the strings.
drum: a musical instrument that people hit with sticks or hands; It gives the rhythm of a song.
bell: a hollow piece of metal that rings when it is struck; Its sound can be heard far away.
ball: a round object that bounces and rolls; Children throw it, kick it, and catch it.
kite: a light toy that flies in the wind on a long string; Children fly it on windy days.
balloon: a thin bag that is filled with air; People use it at parties.
tent: a small house of cloth; People sleep in it when they camp.
oven: a box that gets very hot inside; People bake bread and cakes in it.
refrigerator: a machine that keeps food cold; It stops milk and meat from going bad.
kettle: a pot with a handle and a spout; People boil water in it.
roof: the top of a house; It keeps out the rain and the snow.
wall: one of the sides of a room or a house; It holds up the roof.
fence: a barrier around a garden or a field; It keeps animals in or out.
road: a long strip of hard ground; Cars and people travel on it.
tower: a tall and narrow building; From the top people can see very far.
windmill: a building with big arms that turn in the wind; It can grind grain or make electricity.
nest: a small home that a bird builds; A bird lays its eggs in it.
flag: a piece of cloth with colors; It stands for a country or a team.
coin: a flat round piece of metal; People pay for things with it.
ticket: a small piece of paper; It shows that you have paid for a trip or a show.
crown: a ring of gold and jewels for the head; Kings and queens wear it.
flower: the colorful part of a plant; Many flowers smell sweet, and bees visit them.
tree: a tall plant with a trunk, branches, and leaves; It gives shade, fruit, and wood.
leaf: a flat green part of a plant; It catches the light of the sun.
seed: a small part of a plant; A new plant can grow from it.
cloud: a white or gray shape in the sky; It is made of tiny drops of water.
river: a long stream of fresh water; It flows through the land to the sea.
mountain: a very high part of the land; Some mountains have snow on the top all year.
lake: a large area of water with land all around it; People swim and fish in it.
forest: a large area with many trees; Many animals live in it.
garden: a piece of land where flowers and vegetables grow; People work and rest in it.
farm: a place where people grow food and keep animals; Farmers work there.
market: a place where people buy and sell things; You can find fruit, bread, and fish there.
museum: a building where people can see art and old things; Visitors learn about the past there.
castle: a large old building with thick walls and towers; Kings and knights lived in it long ago.
kitchen: a room where people cook; It has a stove, a sink, and a table.
station: a place where trains or buses stop; Travelers wait there.
teacher: a person who helps others learn; A teacher works in a school.
doctor: a person who helps sick people get well; A doctor works in a hospital or an office.
nurse: a person who takes care of sick people; A nurse works with doctors in a hospital.
baker: a person who makes bread and cakes; A baker gets up very early in the morning.
farmer: a person who grows food and keeps animals; A farmer works in the fields.
pilot: a person who flies an airplane; A pilot must stay calm and know the weather.
sailor: a person who works on a ship; A sailor travels across the sea.
carpenter: a person who makes things of wood; A carpenter builds tables, chairs, and houses.
firefighter: a person who puts out fires; Firefighters also save people and animals in danger.
cat: a small animal with soft fur and sharp claws; Many people keep one as a pet.
dog: a friendly animal that lives with people; It can guard a house and play with children.
horse: a large animal with four legs and a long tail; People ride it.
cow: a large farm animal; It eats grass and gives milk.
sheep: a farm animal with thick wool; People make warm clothes from its wool.
pig: a farm animal with a flat nose and a curly tail; It likes to lie in the mud.
hen: a bird that lives on a farm; It lays eggs.
rabbit: a small animal with long ears; It hops and eats grass and carrots.
mouse: a very small animal with a long tail; It likes seeds and cheese.
fox: a wild animal with red fur and a bushy tail; It lives in the forest and hunts at night.
bear: a big and strong animal with thick fur; It likes honey and sleeps in winter.
wolf: a wild animal that looks like a big dog; It lives and hunts in a group.
lion: a large wild cat; It lives in Africa and is called the king of the animals.
elephant: a very large gray animal with a long trunk; It drinks and picks things up with its trunk.
giraffe: an animal with a very long neck; It eats leaves from tall trees.
monkey: a clever animal that climbs trees; It likes to eat fruit.
penguin: a black and white bird that cannot fly; It swims very well and lives where it is cold.
owl: a bird with big eyes that hunts at night; It catches mice and sleeps during the day.
duck: a bird that swims on ponds and lakes; It has wide feet and a flat beak.
frog: a small green animal that jumps; It lives near ponds and eats flies.
fish: an animal that lives in water; It swims with its fins and breathes with its gills.
whale: a very large animal that lives in the sea; It breathes air and sings under water.
dolphin: a clever animal that lives in the sea; It jumps out of the water and likes to play.
bee: a small insect with yellow and black stripes; It visits flowers and makes honey.
butterfly: an insect with large colorful wings; It begins its life as a caterpillar.
spider: a small animal with eight legs; It catches flies in its web.
snake: a long animal without legs; It moves by sliding over the ground.
turtle: a slow animal with a hard shell; It can hide inside its shell.
apple: a round fruit that grows on a tree; It can be red, green, or yellow.
banana: a long yellow fruit; It is soft and sweet inside.
orange: a round fruit with a thick skin; Its juice is sweet.
carrot: a long orange vegetable that grows under the ground; Rabbits and people like it.
potato: a vegetable that grows under the ground; People boil it, bake it, or fry it.
sandwich: two slices of bread with something between them; It is easy to take along.
cake: a sweet food that is baked in an oven; People eat it at birthdays.
soup: a hot liquid food; It is made of vegetables or meat in water.
pizza: a flat round bread with tomatoes and cheese on top; It comes from Italy.
"""


def _rows() -> list[tuple[str, str, str]]:
    rows = []
    for line in _TABLE.strip().split("\n"):
        noun, _, rest = line.partition(": ")
        kind, _, use = rest.partition("; ")
        rows.append((noun, kind, use))
    return rows


ROWS = _rows()
_BARE = frozenset({"soap", "soup", "rope"})


def definition(rng: random.Random) -> tuple[str, str]:
    """A question for what a thing is, and its answer."""
    noun, kind, use = rng.choice(ROWS)
    named = noun if noun in _BARE else f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"
    asked = rng.choice(("What is {n}?", "What is {n}?", "What's {n}?", "Explain what {n} is.", "Can you tell me what {n} is?", "Tell me what {n} is.", "What does the word {w} mean?", "Define {w}.", "Please explain the word {w}."))  # fmt: skip
    text = f"{named[0].upper()}{named[1:]} is {kind}."
    return asked.format(n=named, w=noun), text if rng.random() < 0.25 else f"{text} {use}"
